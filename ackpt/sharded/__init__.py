"""Sharded training: what FSDP2 adds to a step on every rank, and plans for the blocks of a sharded model.

Read `sharding` first (bytes of shards and collectives), then `planner`, which is behind ``ackpt plan --fsdp``.
"""
