"""PowerSGD by torch's hook: what it keeps between steps, after an overflow and in checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

BOTH = """
    import torch
    from torch import nn
    import evenstep as es

    def prepared(build, compression="powersgd:1", engine="torch", **options):
        torch.manual_seed(2)
        model = build()
        return es.prepare(model, compression=compression, engine=engine, **{"bucket_cap_mb": 0.0001, **options})

    def exchanged(model, number, bad=False, only=None):
        draw = torch.Generator().manual_seed(1000 * es.rank() + number)
        for name, p in model.named_parameters():
            p.grad = None if only and not name.startswith(only) else torch.randn(p.shape, generator=draw).to(p.dtype)
        if bad and es.rank() == 1:
            next(p.grad for p in model.parameters() if p.grad is not None).view(-1)[3] = float("inf")
        es.exchange_gradients()
        got = [p.grad.clone() for p in model.parameters() if p.grad is not None]
        model.zero_grad()
        return got

    def engine():
        return es.session().steps.syncs[-1].engine

    def kept():
        return {name: one.clone() for name, one in engine().feedback_state().items()}

    def same(a, b):
        return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)

    def two():
        return nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16))
"""


def test_a_step_whose_gradients_overflow_leaves_no_trace(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    model = prepared(two)
    for number in range(20):
        bad = number in (3, 11, 15)
        before = kept()
        got = exchanged(model, number, bad)
        assert all(one.isfinite().all() for one in got) is not bad, number
        assert same(kept(), before) is bad, number
    assert int(kept()["iter"]) == 17 and len(engine()._buckets) > 1

    # Nor does a round that is made a second time, as where a gradient changes after it was handed over.
    from evenstep.gradients import GradientSync
    for options in (("powersgd:1",), ("topk:0.1", None), ("onebit", None), ("topk:0.1",)):
        ends = []
        for twice in (False, True):
            model = prepared(two, *options)
            GradientSync.refired = property(lambda sync: twice)
            ends.append([one for number in range(14) for one in exchanged(model, number)] + [*kept().values()])
        assert len(ends[0]) > 56 and all(torch.equal(a, b) for a, b in zip(*ends)), options

    # And where p.grad holds the first round's sum it counts once, also where sums are formed of parts as they are.
    for reduction in ("mean", "sum"):
        model = prepared(two, None, None, reduction=reduction)
        for p in model.parameters():
            p.grad = torch.full_like(p, 1.0 + es.rank())
        es.exchange_gradients()
        es.exchange_gradients()
        wanted = 1.5 if reduction == "mean" else 3.0
        assert all(torch.equal(p.grad, torch.full_like(p, wanted)) for p in model.parameters()), reduction

    # Nor is what an encoding left out counted twice there: what has come and what waits are what was there, made twice or once.
    from evenstep.group import gather_objects
    def waits(compression):
        total = [torch.zeros_like(p, dtype=torch.float64).view(-1) for p in model.parameters()]
        if compression.startswith("powersgd"):
            for index, left in engine()._left_of_parameters(engine().feedback_state()).items():
                total[index] += left / es.world_size()
        else:
            for key, left in engine().feedback_state().items():
                if key.startswith(("left", "sum")):
                    index, first = map(int, [*key.split(), "0"][1:3])
                    total[index][first : first + left.numel()] += left
        rows = gather_objects(es.session().group, [one.tolist() for one in total])
        return [torch.tensor(of_ranks, dtype=torch.float64).sum(0) for of_ranks in zip(*rows)]

    for options in (("powersgd:1",), ("topk:0.1", None), ("onebit", None), ("topk:0.1",), ("onebit",)):
        model = prepared(two, *options)
        GradientSync.refired = False
        for number in range(12):
            exchanged(model, number)
        GradientSync.refired = True
        es.exchange_gradients()  # of none
        for place, p in enumerate(model.parameters()):
            p.grad = torch.full_like(p, 0.5 + es.rank() + place)
        es.exchange_gradients()
        for number in range(3):  # the first parameter's own memory each time, the others' the engine's
            first = next(model.parameters())
            first.grad = torch.randn(first.shape, generator=torch.Generator().manual_seed(es.rank() + number))
            own = gather_objects(es.session().group, first.grad.view(-1).tolist())
            there = [p.grad.view(-1).double() for p in model.parameters()]
            there[0] = torch.tensor(own, dtype=torch.float64).mean(0)
            before = [a + b for a, b in zip(there, waits(options[0]))]
            es.exchange_gradients()
            assert all(p.grad is view for p, view in list(zip(model.parameters(), engine().views))[1:])
            after = [p.grad.view(-1).double() + b for p, b in zip(model.parameters(), waits(options[0]))]
            assert all(torch.allclose(a, b, atol=1e-5) for a, b in zip(before, after)), (options, number)
    """
    run_ranks(BOTH + code)


def test_going_back_forgets_what_came_after(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    for at in (0, 3, 14):  # before the first exchange, among the plain ones, among the compressed ones
        model = prepared(two)
        for number in range(at):
            exchanged(model, number)
        there, ends = kept(), []
        for _ in range(2):
            engine().load_feedback(there)
            ends.append([one for number in range(at, 20) for one in exchanged(model, number)])
        assert all(torch.equal(a, b) for a, b in zip(*ends)), at
        engine().load_feedback({})
        assert same(kept(), {"iter": torch.tensor(0)})

    # In other buckets what was left out goes with its parameters.
    def of_parameters():
        lies = [index for one in engine()._buckets for index in one.indices]
        flat = torch.cat([engine().state.error_dict[number] for number in range(len(engine()._buckets))])
        return dict(zip(lies, flat.split([engine().views[index].numel() for index in lies])))

    model = prepared(two, bucket_cap_mb=0.0012)
    for number in range(14):
        exchanged(model, number)
    there, wanted = kept(), of_parameters()
    assert [len(one.indices) for one in engine()._buckets] == [3, 1]
    assert len(wanted) == 4 and all(one.norm() > 1 for one in wanted.values())
    assert exchanged(model, 14) and engine().load_feedback(there) is False and same(kept(), there)
    model = prepared(two, bucket_cap_mb=1)
    assert engine().load_feedback(there) and engine().state.iter == 14 and not engine().state.p_memory_dict
    got = of_parameters()
    assert len(engine()._buckets) == 1 and all(torch.equal(got[index], one) for index, one in wanted.items())
    assert all(one.isfinite().all() for one in exchanged(model, 14)) and engine().state.p_memory_dict
    del there["b0"]  # an older checkpoint, of other sizes
    assert engine().load_feedback({"0": there["0"], "iter": there["iter"]}) is False and not engine().state.error_dict
    """
    run_ranks(BOTH + code)


def test_what_was_left_out_of_a_parameter_waits_until_it_is_used_again(run_ranks: Callable[..., list[Any]]) -> None:
    code = """
    torch.manual_seed(2)
    model = es.prepare(two(), compression="powersgd:1", engine="torch")
    for number in range(14):
        exchanged(model, number)
    before = kept()["0"]
    first = before[272:]  # of the first layer: the last parameter lies first in the one bucket
    for number in range(14, 17):
        got = exchanged(model, number, only="1.")
        assert len(got) == 2 and first.norm() > 1 and torch.equal(kept()["0"][272:], first)
    assert not torch.equal(kept()["0"][:272], before[:272])
    """
    run_ranks(BOTH + code)


def test_float16_needs_no_thread_of_torch(run_ranks: Callable[..., list[Any]]) -> None:
    """Its hook's callbacks wait for further sums, which ends where each is made on the thread that asks."""
    code = """
    torch.set_num_interop_threads(1)
    torch.manual_seed(2)
    model = es.prepare(two().half(), compression="powersgd:1", bucket_cap_mb=0.0001)
    for number in range(14):  # plain ones, then compressed ones
        got = exchanged(model, number)
        assert all(one.isfinite().all() for one in got) and len(got) == 4, number
    assert engine()._sums is not None and not engine()._sums.error
    """
    run_ranks(BOTH + code, fresh=True)
