"""The planner: plan a training step within a memory budget, which bounds its measured peak, and run the plan.

A step passes through the packages in this order: ``capture`` records it as a joint graph, ``costs`` adds seconds, FLOPs
and bytes, ``policies`` search for a schedule, ``schedule`` simulates and rewrites it, and ``step`` runs it. A `Request`
(``request``) has all options, and ``choose`` makes the plan that it asks for. ``parts`` plans models that cannot be
captured as one graph, ``sharding`` plans FSDP2, ``backend`` is the backend of ``torch.compile``, ``explain`` says where
memory goes, and ``workloads`` builds training steps from shapes. Read `api` first, then `choose` and `step`.
"""
