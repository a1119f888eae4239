// Attention over keys and values in memory. Included by impl.h.
//
// A lane is one head of one token. Lanes that see the same positions go together, eight at a time: a key or value is loaded
// for all of them, and their sums stay in registers. Keys are turned round first, so that a vector is sixteen positions and
// nothing has to be summed across it; where there are many lanes, values are widened to floats first. Both a part at a time
// that stays near while all lanes use it.
//
// What a lane computes is the same whoever goes with it: a score is one chain over the head's dimensions, a value one chain
// over the positions, and positions are taken in blocks that begin at multiples of kAttendBlock.
#pragma once

namespace {

#if defined(__AVX512F__)
constexpr int kTogether = 8;  // lanes; with two keys, or two vectors of a value, sixteen sums
#else
constexpr int kTogether = 2;
#endif
constexpr int64_t kStrip = 2 * 16;  // floats of values that are gathered at a time

template <bool BF16>
MF_INLINE V load_kv(const uint8_t* p, int64_t i, int n) {
    if (!BF16) return n == 16 ? vload((const float*)p + i) : vload_n((const float*)p + i, n);
    const uint16_t* h = (const uint16_t*)p + i;
    if (n == 16) return vbf16(h);
    uint16_t tail[16] = {};
    memcpy(tail, h, size_t(n) * 2);
    return vbf16(tail);
}

MF_INLINE void prefetch(const uint8_t* p, int64_t n) {
    for (int64_t i = 0; i < n; i += 64) __builtin_prefetch(p + i);
}

// Rows of keys or values.
struct Rows {
    const uint8_t* first;
    int64_t bytes;  // from row to row
};

// Lanes that go through a block: of each token `heads`, of which the first sees n positions and each one after it one more.
struct Lanes {
    int64_t count, heads, n, dim, value_dim;
    float scale;
    const float* const* q;
    float *share, *top, *sum, *acc;  // of the first; kAttendBlock, 1, 1 and value_dim from lane to lane
};

MF_INLINE int64_t seen(const Lanes& s, int64_t lane) { return lower(kAttendBlock, s.n + lane / s.heads); }

MF_INLINE Lanes from_lane(Lanes s, int64_t lane) {
    s.n = seen(s, lane);
    s.q += lane;
    s.share += lane * kAttendBlock;
    s.acc += lane * s.value_dim;
    return s;
}

// A strip of n columns from i on, of so many rows, as floats.
template <bool BF16>
MF_INLINE void widen(Rows rows, int64_t count, int64_t i, int64_t n, float* out) {
    for (int64_t j = 0; j < count; ++j, out += n)
        each(n, out, [&](int64_t c, int m) { return load_kv<BF16>(rows.first + j * rows.bytes, i + c, m); });
}

// Rows [first, last) as floats, turned round: out[i * kAttendTurned + row - first], and 0 where there is no row. Meanwhile the
// rows that will be turned next and those of `others` are brought in.
template <bool BF16>
MF_INLINE void turn(Rows rows, int64_t first, int64_t last, int64_t n, float* out, Rows others) {
    for (int64_t part = 0; part < kAttendTurned; part += 16)
        for (int64_t i = 0; i < n; i += 16) {
            const int m = int(lower(16, n - i));
            V block[16];
#pragma GCC unroll 16
            for (int r = 0; r < 16; ++r) {
                const int64_t j = first + part + r;
                const uint8_t* p = rows.first + j * rows.bytes;
                if (i % (BF16 ? 32 : 16) == 0) {
                    __builtin_prefetch(p + kAttendTurned * rows.bytes + i * (BF16 ? 2 : 4));
                    __builtin_prefetch(others.first + j * others.bytes + i * (BF16 ? 2 : 4));
                }
                block[r] = j < last ? load_kv<BF16>(p, i, m) : vset(0);
            }
            vturn(block);
            for (int c = 0; c < m; ++c) vstore(out + (i + c) * kAttendTurned + part, block[c]);
        }
}

// Scores of L lanes with the positions from j on whose keys were turned.
template <int L>
void score(const Lanes& s, const float* turned, int64_t j) {
    constexpr int P = kAttendTurned / 16;
    V sums[L * P];
    for (V& sum : sums) sum = vset(0);
    for (int64_t i = 0; i < s.dim; ++i, turned += kAttendTurned) {
        V k[P];
        for (int p = 0; p < P; ++p) k[p] = vload(turned + p * 16);
        for (int l = 0; l < L; ++l) {
            const V q = vpin(vset(s.q[l][i]));
            for (int p = 0; p < P; ++p) sums[l * P + p] = vfma(q, k[p], sums[l * P + p]);
        }
    }
    for (int l = 0; l < L; ++l)
        for (int p = 0; p < P; ++p) vstore(s.share + l * kAttendBlock + j + p * 16, vmul(sums[l * P + p], vset(s.scale)));
}

MF_INLINE void score_lanes(const Lanes& s, const float* turned, int64_t j) {
    int64_t l = 0;
    if constexpr (kTogether == 8) {
        for (; l + 8 <= s.count; l += 8) score<8>(from_lane(s, l), turned, j);
        for (; l + 4 <= s.count; l += 4) score<4>(from_lane(s, l), turned, j);
    }
    for (; l + 2 <= s.count; l += 2) score<2>(from_lane(s, l), turned, j);
    if (l < s.count) score<1>(from_lane(s, l), turned, j);
}

// From scores to shares relative to the highest so far. keep: what each lane's sums up to here are to be multiplied with.
MF_INLINE void weigh_scores(const Lanes& s, float* keep) {
    float now[kAttendTokens * kAttendHeads];
    const auto filled = [&](int64_t l) { return (seen(s, l) + 15) / 16 * 16; };
    for (int64_t l = 0; l < s.count; ++l) {
        float* share = s.share + l * kAttendBlock;
        for (int64_t j = seen(s, l); j < filled(l); ++j) share[j] = -INFINITY;
        V high = vload(share);
        for (int64_t j = 16; j < filled(l); j += 16) high = vmax(high, vload(share + j));
        now[l] = vhigh(high);
    }
    each(s.count, now, [&](int64_t l, int m) { return vmax(vload_n(now + l, m), vload_n(s.top + l, m)); });
    each(s.count, keep, [&](int64_t l, int m) { return vexp(vsub(vload_n(s.top + l, m), vload_n(now + l, m))); });
    for (int64_t l = 0; l < s.count; ++l) {
        float* share = s.share + l * kAttendBlock;
        if (s.top[l] == -INFINITY) keep[l] = 0;
        for (int64_t j = 0; j < filled(l); j += 16) vstore(share + j, vexp(vsub(vload(share + j), vset(now[l]))));
        for (int64_t j = seen(s, l); j < filled(l); ++j) share[j] = 0;
        V sum = vload(share);
        for (int64_t j = 16; j < filled(l); j += 16) sum = vadd(sum, vload(share + j));
        s.top[l] = now[l];
        s.sum[l] = s.sum[l] * keep[l] + vsum(sum);
    }
}

// NV vectors of the values of L lanes, from column i of the lanes and from element `at` of the rows; n: of a lone vector.
template <int L, int NV, bool BF16>
void gather(const Lanes& s, Rows values, int64_t at, const float* keep, int64_t i, int n) {
    V sums[L * NV];
    const auto to = [&](int l, int v) { return s.acc + l * s.value_dim + i + v * 16; };
    for (int l = 0; l < L; ++l)
        for (int v = 0; v < NV; ++v) sums[l * NV + v] = vmul(n == 16 ? vload(to(l, v)) : vload_n(to(l, v), n), vset(keep[l]));
    const uint8_t* p = values.first;
    for (int64_t j = 0; j < s.n; ++j, p += values.bytes) {
        V x[NV];
        for (int v = 0; v < NV; ++v) x[v] = load_kv<BF16>(p, at + v * 16, n);
        for (int l = 0; l < L; ++l) {
            const V w = vpin(vset(s.share[l * kAttendBlock + j]));
            for (int v = 0; v < NV; ++v) sums[l * NV + v] = vfma(w, x[v], sums[l * NV + v]);
        }
    }
    for (int l = 0; l < L; ++l)
        for (int v = 0; v < NV; ++v) {
            if (n == 16) vstore(to(l, v), sums[l * NV + v]);
            else vstore_n(to(l, v), sums[l * NV + v], n);
        }
}

template <int NV, bool BF16>
MF_INLINE void gather_lanes(const Lanes& s, Rows values, int64_t at, const float* keep, int64_t i, int n) {
    int64_t l = 0;
    if constexpr (kTogether == 8) {
        for (; l + 8 <= s.count; l += 8) gather<8, NV, BF16>(from_lane(s, l), values, at, keep + l, i, n);
        for (; l + 4 <= s.count; l += 4) gather<4, NV, BF16>(from_lane(s, l), values, at, keep + l, i, n);
    }
    for (; l + 2 <= s.count; l += 2) gather<2, NV, BF16>(from_lane(s, l), values, at, keep + l, i, n);
    if (l < s.count) gather<1, NV, BF16>(from_lane(s, l), values, at, keep + l, i, n);
}

// Column by column of the values, of lanes that see the same positions. `wide`: scratch.
template <bool BF16>
MF_INLINE void gather_all(const Lanes& s, Rows values, const float* keep, float* wide) {
    const bool many = s.count > kTogether;
    int64_t i = 0;
    for (; i + kStrip <= s.value_dim; i += kStrip) {
        if (many) {
            widen<BF16>(values, s.n, i, kStrip, wide);
            gather_lanes<2, false>(s, {(const uint8_t*)wide, kStrip * 4}, 0, keep, i, 16);
        } else {
            gather_lanes<2, BF16>(s, values, i, keep, i, 16);
        }
    }
    for (; i < s.value_dim; i += 16) gather_lanes<1, BF16>(s, values, i, keep, i, int(lower(16, s.value_dim - i)));
}

template <bool BF16>
void attend_block(const Lanes& s, Rows keys, Rows values, float* wide) {
    const int64_t most = seen(s, s.count - 1);
    for (int64_t j = 0; j < most; j += kAttendTurned) {
        turn<BF16>(keys, j, most, s.dim, wide, values);
        score_lanes(s, wide, j);
    }
    float keep[kAttendTokens * kAttendHeads];
    weigh_scores(s, keep);
    if (s.n >= kAttendBlock) {
        gather_all<BF16>(from_lane(s, 0), values, keep, wide);
        return;
    }
    for (int64_t l = 0; l < s.count; l += s.heads) {  // token by token
        Lanes one = from_lane(s, l);
        one.count = s.heads;
        gather_all<BF16>(one, values, keep + l, wide);
    }
}

void attend(const AttendSpan& s, int64_t first_head, int64_t last_head, int64_t first, int64_t last, float* work) {
    const int64_t heads = last_head - first_head, lanes = (last - first) * heads;
    const int64_t group = first_head / (s.heads / s.groups), element = s.dtype == Dtype::f32 ? 4 : 2;
    const int64_t key_bytes = s.key_stride * element, value_bytes = s.value_stride * element;
    float *share = work, *acc = share + lanes * kAttendBlock, *wide = acc + lanes * s.value_dim;
    const float* q[kAttendTokens * kAttendHeads];
    float top[kAttendTokens * kAttendHeads], sum[kAttendTokens * kAttendHeads];
    for (int64_t i = 0; i < lanes; ++i) {
        q[i] = s.q + ((first + i / heads) * s.heads + first_head + i % heads) * s.dim;
        top[i] = -INFINITY;
        sum[i] = 0;
    }
    memset(acc, 0, size_t(lanes * s.value_dim) * 4);
    static_assert(kStateBlock % kAttendBlock == 0);  // so a step never leaves a block
    for (int64_t begin = 0; begin < s.position + last; begin += kAttendBlock) {
        const int64_t block = begin / kStateBlock, within = begin % kStateBlock;
        const Rows keys = {s.keys[block] + within * key_bytes + group * s.dim * element, key_bytes};
        const Rows values = {s.values[block] + within * value_bytes + group * s.value_dim * element, value_bytes};
        const int64_t n = s.position + first + 1 - begin;             // what the first token sees of it,
        const int64_t lane = n > 0 ? 0 : lower(lanes, (1 - n) * heads);  // and the first that sees any
        if (lane == lanes) continue;
        const Lanes some = {lanes - lane, heads, n > 0 ? n : 1, s.dim, s.value_dim, s.scale, q + lane, share + lane * kAttendBlock,
                            top + lane, sum + lane, acc + lane * s.value_dim};
        if (s.dtype == Dtype::f32) attend_block<false>(some, keys, values, wide);
        else attend_block<true>(some, keys, values, wide);
    }
    for (int64_t lane = 0; lane < lanes; ++lane) {
        float* out = s.out + ((first + lane / heads) * s.heads + first_head + lane % heads) * s.value_dim;
        const V total = vset(sum[lane]);
        each(s.value_dim, out, [&](int64_t i, int m) { return vdiv(vload_n(acc + lane * s.value_dim + i, m), total); });
    }
}

}  // namespace
