"""Leases show the bytes of the files, whatever the codec, the layout, the reader and the number of slots."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from moeflux.core.errors import ClosedError, FormatError, InputError, OptionError, ReadError, StateError
from moeflux.formats.checkpoint import Checkpoint, read_config
from moeflux.formats.experts import ExpertLayout, Projection
from moeflux.formats.quant import Affine, decode
from moeflux.models.registry import read_spec
from moeflux.store.store import ExpertStore, StoreOptions, slot_bytes
from store.synthetic import CODECS, fill, held, load, make_experts, resident

READERS = [("native", False), ("native", True), ("python", False), ("python", True)]


@pytest.mark.parametrize(("reader", "direct"), READERS)
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("fused", [False, True])
def test_bytes_of_files(tmp_path, reader, direct, codec, fused):
    experts = make_experts(tmp_path, codec=CODECS[codec], fused=fused, n_files=2, first_layer=1)
    with experts.open(n_slots=4, reader=reader, direct=direct) as store:
        for layer in (1, 3, 2, 1):
            for ids in ([0, 5, 0], [[3, 1], [1, 4]]):
                with store.acquire(layer, np.array(ids)) as lease:
                    lease.wait()
                    for expert in np.unique(ids).tolist():
                        assert held(lease, expert) == experts.contents[layer, expert]


@pytest.mark.parametrize("name", ["qwen3_moe-4bit-f32", "qwen3_5_moe_vl_fused-4bit", "deepseek_v3-4bit-f32"])
def test_matrices_of_a_checkpoint(mlx, name):
    spec = read_spec(read_config(mlx(name)))
    checkpoint = Checkpoint(mlx(name), spec.names)
    layers = [layer for layer, _ in spec.moe_layers()]
    with ExpertStore(checkpoint, layers, StoreOptions(n_slots=3, k=2)) as store:
        for layer in layers:
            table = checkpoint.experts(layer)
            for expert in range(table.n_experts):
                with store.acquire(layer, [expert]) as lease:
                    lease.wait()
                    source = f"{checkpoint.files.paths[table.extents(0)[0].file].name}: layer {layer}, expert {expert}"
                    pieces = [_bytes_of(checkpoint, extent) for extent in table.extents(expert)]
                    expected = table.layout.assemble(pieces, source)
                    for part, matrix in lease.matrices(expert).items():
                        np.testing.assert_array_equal(decode(matrix), decode(expected[part]))
                        assert matrix.source == expected[part].source
    checkpoint.close()


def _bytes_of(checkpoint, extent):
    with checkpoint.files.paths[extent.file].open("rb") as file:
        file.seek(extent.offset)
        return np.frombuffer(file.read(extent.length), np.uint8)


def test_hits_come_first(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=6, reader="manual") as store:
        load(store, experts, 0, [1, 4])
        with store.acquire(0, [4, 2, 1, 2]) as lease:
            assert lease.next() == [1, 4]
            assert lease.next(wait=False) == []
            assert lease.native.left == 1
            fill(store, experts)
            assert lease.next() == [2]
            assert lease.next() == []
        stats = store.stats()
        assert (stats.acquires, stats.asked, stats.hits, stats.misses, stats.joined) == (2, 5, 2, 3, 0)


def test_two_leases_share_a_read(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=2, reader="manual") as store:
        first, second = store.acquire(0, [3]), store.acquire(0, [3])
        assert set(fill(store, experts)) == {(0, 3)}
        assert first.next() == second.next() == [3]
        first.release()
        assert held(second, 3) == experts.contents[0, 3]
        second.release()
        stats = store.stats()
        assert (stats.misses, stats.joined) == (1, 1)
        assert stats.bytes_demand == experts.experts(0).layout.nbytes


def test_a_lease_ends(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=2) as store:
        with store.acquire(0, [3]) as lease:
            with pytest.raises(StateError, match="does not hold"):
                lease.matrices(2)
            lease.wait()
            with pytest.raises(StateError, match="does not hold"):
                lease.release([5])
            lease.release([3])
            with pytest.raises(StateError, match="does not hold"):
                lease.matrices(3)
        lease.release()
        with pytest.raises(StateError, match="released"):
            lease.next()
        assert [slot[2] for slot in store.native.slots()] == [0, 0]


def test_a_lease_that_is_dropped_takes_its_reads_back(tmp_path):
    experts = make_experts(tmp_path)
    with experts.open(n_slots=4, reader="manual") as store:
        lease = store.acquire(0, [1, 2])
        job = store.native.take_job(0)
        assert (job.layer, job.expert) == (0, 1)
        lease.release()
        assert {slot[3] for slot in store.native.slots()} == {"filling", "empty"}  # only the one under way goes on
        job.buffer[:] = np.frombuffer(experts.contents[0, 1][job.component], np.uint8)
        job.finish(job.length)
        assert set(fill(store, experts)) == {(0, 1)}
        assert resident(store) == {(0, 1)}


def test_what_is_not_there_is_refused(tmp_path):
    experts = make_experts(tmp_path, first_layer=1)
    with experts.open(n_slots=2) as store:
        for layer, expert in ((0, 0), (4, 0), (-1, 0), (1, 6), (1, -1)):
            with pytest.raises(InputError, match=r"layer|expert"):
                store.acquire(layer, [expert])
            with pytest.raises(InputError, match=r"layer|expert"):
                store.hint(layer, [expert])
        with store.acquire(1, []) as lease:
            assert lease.next() == []
    for wrong in ({"policy": "best"}, {"reader": "mmap"}, {"n_slots": 0}, {"n_readers": 0}, {"sweep_slots": 0}, {"k": 0}):
        with pytest.raises(OptionError):
            experts.open(**{"n_slots": 2, **wrong})


def test_close(tmp_path):
    experts = make_experts(tmp_path)
    store = experts.open(n_slots=2)
    lease = store.acquire(0, [1])
    lease.wait()
    views = lease.native.views(1)
    waiting = store.acquire(1, [1])
    store.close()
    store.close()
    assert [bytes(view) for view in views] == experts.contents[0, 1]
    for call in (waiting.next, lambda: store.acquire(0, [1]), lambda: store.hint(0, [1])):
        with pytest.raises(ClosedError):
            call()
    waiting.release()
    lease.release()
    assert [bytes(view) for view in views] == experts.contents[0, 1]
    assert store.stats().slots_used == 0


def test_slot_bytes_of_published_shapes():
    def layout(hidden, width):
        codec = Affine(4, 64, "BF16")
        shapes = {"gate": (width, hidden), "up": (width, hidden), "down": (hidden, width)}
        return ExpertLayout(tuple(Projection(name, codec, shape) for name, shape in shapes.items()))

    small, large = layout(2048, 512), layout(4096, 1536)
    assert slot_bytes([small], False) == small.nbytes == 1769472
    assert slot_bytes([small], True) == small.nbytes + 3 * 4096  # three weights in place, scales and biases copied
    assert slot_bytes([small, large], False) == large.nbytes


def test_slots_have_the_size_that_was_promised(tmp_path):
    for direct in (False, True):
        for n, codec in enumerate(CODECS.values()):
            folder = tmp_path / f"{direct}-{n}"
            folder.mkdir()
            experts = make_experts(folder, codec=codec, hidden=512, width=512, n_layers=1, n_experts=2)
            with experts.open(n_slots=1, direct=direct, reader="manual") as store:
                assert store.native.slot_bytes == slot_bytes([experts.experts(0).layout], direct)
                load(store, experts, 0, [0])
                assert store.stats().bytes_resident == experts.experts(0).layout.nbytes <= store.native.slot_bytes


def test_scales_that_are_kept_are_read_once(tmp_path):
    """Twice as many experts as slots, three times round: from the second time on, weights only."""
    experts = make_experts(tmp_path, codec=CODECS["affine"], n_layers=2, n_experts=4)
    layout = experts.experts(0).layout
    weights = sum(component.nbytes for component in layout.components() if component.is_weight)
    for keep_scales, again in ((True, weights), (False, layout.nbytes)):
        with experts.open(n_slots=4, keep_scales=keep_scales) as store:
            assert store.native.slot_bytes == slot_bytes([layout], False, keep_scales)
            read = []
            for _ in range(3):
                before = store.stats().bytes_read
                for layer in (0, 1):
                    with store.acquire(layer, range(4)) as lease:
                        lease.wait()
                        for expert in range(4):
                            assert held(lease, expert) == experts.contents[layer, expert]
                read.append(store.stats().bytes_read - before)
            assert read == [8 * layout.nbytes, 8 * again, 8 * again]
            kept = 8 * (layout.nbytes - weights) if keep_scales else 0
            assert store.stats().bytes_resident == 4 * again + kept


def test_kept_scales_outlive_their_slot_and_a_second_read_of_them(tmp_path):
    """A read fails, and the expert is asked for anew, beside what is left of the first: leases see none of it."""
    experts = make_experts(tmp_path, codec=CODECS["affine"])
    with experts.open(n_slots=4, reader="manual", keep_scales=True) as store:
        first = store.acquire(0, [3])
        jobs = [store.native.take_job(0) for _ in range(9)]
        by_component = {job.component: job for job in jobs}
        by_component[0].finish(0, errno.EIO)
        second = store.acquire(0, [3])
        fill(store, experts)
        assert second.next() == [3]
        for component, job in by_component.items():
            if component:
                job.buffer[:] = 0  # another read of the same bytes would bring the same; here it is seen if it is used
                job.finish(job.length)
        assert held(second, 3) == experts.contents[0, 3]
        with pytest.raises(ReadError):
            first.next()
        first.release()
        second.release()


def test_scales_that_cannot_be_read_are_asked_for_again(tmp_path):
    experts = make_experts(tmp_path, codec=CODECS["affine"])
    with experts.open(n_slots=2, reader="manual", keep_scales=True) as store:
        lease = store.acquire(0, [1])
        for _ in range(9):
            job = store.native.take_job(0)
            if job.component == 4:
                job.buffer[:] = 0xFF
            else:
                job.buffer[:] = np.frombuffer(experts.contents[0, 1][job.component], np.uint8)
            job.finish(job.length)
            if job.component == 4:
                break
        with pytest.raises(FormatError, match="scales holds NaN"):
            lease.next()
        lease.release()
        load(store, experts, 0, [1])
        with store.acquire(0, [1]) as lease:
            assert lease.next() == [1]
            assert held(lease, 1) == experts.contents[0, 1]


def test_no_more_is_under_way_than_allowed(tmp_path):
    """A read begins only beside others that are small enough together; alone, always."""
    experts = make_experts(tmp_path, codec=CODECS["affine"], hidden=256, width=256)
    sizes = [component.nbytes for component in experts.experts(0).layout.components()]
    with experts.open(n_slots=4, reader="manual", under_way=sizes[0] + sizes[1]) as store, store.acquire(0, [2]) as lease:
        take = store.native.take_job
        first, second = take(0), take(0)
        assert (first.component, second.component) == (0, 1)
        assert take(0) is None
        first.finish(0, errno.EIO)
        second.finish(second.length)
        with pytest.raises(ReadError):
            lease.next()
        for expert, limit in ((3, 1), (4, 10 * sum(sizes))):
            with experts.open(n_slots=4, reader="manual", under_way=limit) as other, other.acquire(0, [expert]) as lease:
                jobs = [other.native.take_job(0) for _ in range(9)]
                assert sum(job is not None for job in jobs) == (1 if limit == 1 else 9)
                del jobs
    for reader in ("native", "python"):
        options = {"reader": reader, "n_readers": 4, "under_way": sizes[0], "keep_scales": True}
        with experts.open(n_slots=3, **options) as store, store.acquire(1, range(6), sweep=True) as lease:
            left = set(range(6))
            while ready := lease.next():
                assert all(held(lease, expert) == experts.contents[1, expert] for expert in ready)
                left -= set(ready)
                lease.release(ready)
            assert left == set()
