"""A Gloo group is there for all ranks when it is for one, or for none."""

from __future__ import annotations

import json

import pytest
from conftest import Run

pytest.importorskip("torch")

OPENING = """
    import json, os, sys, time
    from datetime import timedelta
    import torch, torch.distributed as dist
    import evenstep
    from evenstep.gloo_group import open_gloo
    from evenstep.group_end import end_calls

    rank, size, limit = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), timedelta(seconds=60)
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), size, rank == 0, limit)
    gloo = dist.ProcessGroupGloo

    def end(name):
        # All have come here before one goes; the first rank, which has the store, is the last.
        for turn in ("here", "gone"):
            store.set(f"{name}/{turn}/{rank}", "")
            if turn == "here" or rank == 0:
                store.wait([f"{name}/{turn}/{other}" for other in range(size) if other not in gone], limit)

    gone = []
"""


def test_no_rank_goes_on_before_all_have_the_group(run_ranks: Run) -> None:
    """So none can end it before: the last rank is held back where Gloo has connected it, and all others are told to end the group
    as soon as they have it."""
    script = (
        OPENING
        + """
    def late(*args, **kwargs):
        made = gloo(*args, **kwargs)
        time.sleep(0.5)
        store.set(f"made/{turn}", "")
        return made

    if rank == size - 1:
        dist.ProcessGroupGloo = late
    found = []
    for turn in range(3):
        group, life = open_gloo(dist.PrefixStore(f"group{turn}", store), rank, size, limit)
        found.append([store.check([f"made/{turn}"]), life])
        end_calls(group)
        store.set(f"over/{turn}/{rank}", "")
        store.wait([f"over/{turn}/{other}" for other in range(size)], limit)
    print(json.dumps(found), flush=True)
    end("end")
    os._exit(0)
"""
    )
    found = [json.loads(rank.stdout) for rank in run_ranks(script, 3)]
    assert found[0] == found[1] == found[2]
    assert [made for made, _ in found[0]] == [True] * 3, "a rank had the group before the last one had made it"
    assert len({life for _, life in found[0]}) == 3


@pytest.mark.parametrize("how", ["dies", "late"])
def test_a_rank_that_dies_while_a_group_is_made_is_named(run_ranks: Run, how: str) -> None:
    """After Gloo has connected it; one that hangs there ends the others' wait by the time limit."""
    script = (
        OPENING
        + """
    gone = [2]
    adds = dist.PrefixStore.add

    def made(prefixed, *args):
        store.set(f"there/{rank}", "")
        return adds(prefixed, *args)

    def stops(*args):
        keys = "there" if sys.argv[1] == "dies" else "end/here"  # they have made theirs, or have given up
        store.wait([f"{keys}/{other}" for other in (0, 1)], limit)
        os._exit(0)

    dist.PrefixStore.add = stops if rank in gone else made
    begin = time.monotonic()
    try:
        open_gloo(store, rank, size, timedelta(seconds=60 if sys.argv[1] == "dies" else 10))
    except evenstep.EvenstepError as error:
        print(json.dumps([error.status, error.rank, str(error), time.monotonic() - begin]), flush=True)
        end("end")  # the group goes with the error: whose connections are closed is told as one who has ended
    os._exit(0)
"""
    )
    for rank in run_ranks(script, 3, args=(how,))[:2]:
        status, number, words, seconds = json.loads(rank.stdout)
        if how == "dies":
            assert (status, number) == ("EVEN_ERR_PEER_LOST", 2), words
            assert words.startswith("rank 2 has ended while rank "), words
        else:
            assert status == "EVEN_ERR_TIMEOUT" and seconds > 9.9, words
            assert words.startswith("not all of 3 ranks have made their Gloo group after 10 s"), words
