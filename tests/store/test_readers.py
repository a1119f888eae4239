"""The native readers against the Python ones: the same bytes from any extents, through the page cache or past it."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given, settings
from hypothesis import strategies as st

from moeflux.formats.quant import Affine, Plain
from store.synthetic import held, make_experts

CASES = st.fixed_dictionaries(
    {
        "seed": st.integers(0, 2**31),
        "align": st.sampled_from([1, 2, 4, 64, 512, 4096]),
        "n_files": st.integers(1, 3),
        "fused": st.booleans(),
        "hidden": st.sampled_from([64, 448, 512]),
        "width": st.sampled_from([64, 320, 704]),
        "codec": st.sampled_from([Affine(8, 32, "F32"), Affine(4, 64, "BF16"), Plain("BF16")]),
    }
)


@settings(max_examples=20)
@given(case=CASES, keep_scales=st.booleans())
def test_all_readers_read_the_same(case, keep_scales):
    with TemporaryDirectory() as folder:
        experts = make_experts(Path(folder), n_layers=1, n_experts=3, **case)
        for reader in ("native", "python"):
            for direct in (False, True):
                with (
                    experts.open(n_slots=3, reader=reader, direct=direct, n_readers=2, keep_scales=keep_scales) as store,
                    store.acquire(0, range(3)) as lease,
                ):
                    lease.wait()
                    for expert in range(3):
                        assert held(lease, expert) == experts.contents[0, expert], (reader, direct)
                    assert store.stats().bytes_read == 3 * experts.experts(0).layout.nbytes


def test_direct_reads_are_in_place_where_they_can(tmp_path):
    """A large component lies as far into a page as in its file, unless no number could; a small one is copied."""
    experts = make_experts(tmp_path, codec=Affine(8, 32, "F32"), hidden=512, width=512, n_experts=8, n_layers=1)
    table = experts.experts(0)
    ways = set()
    with experts.open(n_slots=8, direct=True) as store, store.acquire(0, range(8)) as lease:
        lease.wait()
        for expert in range(8):
            for extent, view in zip(table.extents(expert), lease.native.views(expert), strict=True):
                large, fits = extent.length >= 128 * 1024, extent.offset % 4 == 0
                ways.add((large, fits))
                at = view.ctypes.data
                assert at % 4096 == extent.offset % 4096 if large and fits else at % 64 == 0
                assert not view.flags.writeable
            assert held(lease, expert) == experts.contents[0, expert]
    assert ways == {(large, fits) for large in (False, True) for fits in (False, True)}
