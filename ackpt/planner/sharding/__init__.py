"""Sharded training: the memory and communication that FSDP2 adds on every rank, and plans for sharded blocks.

Read `sharding` first (bytes and streams of shards and collectives, window by window), then `planner`; `sharded_model`
is ``ackpt plan --fsdp``. `sharded_step` is `ackpt.apply_budget` for a model after ``fully_shard``, which
`fully_sharded` reads.
"""
