"""The engine with the CUDA transport on a simulated GPU: in random steps all conflicting accesses are ordered.

Every program first runs without offload and must not race either. Then its results with offload must be bit-equal.
"""

import contextlib

import pytest
import simulated_cuda as simulated
from simulated_cuda import Machine, SimulatedTransport
from simulated_steps import Program, simulated_offload, streams_of

STEPS, SEEDS = 6, range(6)
OPTIONS = [
    {},
    {"mode": "sync"},
    {"keep_last": 0},
    {"keep_last": 0, "lookahead_bytes": 0},
    {"keep_last": 3, "lookahead_bytes": 3000},
    {"keep_last": 0, "lookahead_bytes": 1 << 20},
]


def one_stream(program):
    return program.forward


def side_stream(program):
    (stream,) = streams_of(program.machine, 1)

    def forward():
        stream.wait_stream(program.machine.default)
        with program.machine.stream(stream):
            loss = program.forward()
        program.machine.default.wait_stream(stream)
        return loss

    return forward


def hopping(program):
    streams = [program.machine.default, *streams_of(program.machine, 2)]
    return lambda: program.hopping_forward(streams)


def forked(program):
    streams = streams_of(program.machine, 2)
    return lambda: program.forked_forward(streams)


def run_program(seed, shape, options=None, kind=SimulatedTransport):
    """``(races, numbers, engine, machine)`` of a few steps."""
    machine = Machine()
    program = Program(seed, machine)
    forward = shape(program)
    offload = contextlib.nullcontext() if options is None else simulated_offload(machine, kind, **options)
    made = [program.step(forward, offload) for _ in range(STEPS)]
    races = list(machine.races)
    return races, (made, program.checked), getattr(offload, "engine", None), machine


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", [one_stream, side_stream, hopping, forked])
def test_no_accesses_of_a_buffer_or_a_block_are_unordered(shape, options):
    reused = copies = 0
    for seed in SEEDS:
        races, plain, _, _ = run_program(seed, shape)
        assert races == [], "the program itself"
        races, made, engine, machine = run_program(seed, shape, options)
        assert races == [], f"seed {seed}"
        assert made == plain, f"seed {seed}"
        stats = engine.stats()
        assert (stats["store_bytes"], stats["stored"]) == (0, 0)
        reused += machine.reused
        copies += stats["copies_in"]
        engine.release_buffers()
        assert machine.races == [] and engine.stats()["pool_bytes"] == 0
    assert reused > 300 and copies > 30


@pytest.mark.parametrize(
    "broken, shape",
    [
        (simulated.EventBeforeTheCopy, one_stream),
        (simulated.EventOnTheComputingStream, one_stream),
        (simulated.FreesSourceEarly, one_stream),
        (simulated.UsesTargetEarly, one_stream),
        (simulated.IgnoresComputing, one_stream),
        (simulated.CachedStream, side_stream),
        (simulated.CachedStream, hopping),
    ],
    ids=lambda each: each.__name__,
)
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_broken_transport_is_found_with_every_seed(broken, shape, mode):
    for seed in range(4):
        races, *_ = run_program(seed, shape, {"mode": mode, "keep_last": 0}, broken)
        assert races != [], f"seed {seed}"


def test_the_host_waits_for_no_copy():
    *_, machine = run_program(0, one_stream, {"keep_last": 0})
    assert machine.host_waits == 0
