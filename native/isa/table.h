// Fills the table from impl.h. Included by isa/*.cpp after impl.h; a file may define its own layout, quantize and rows first.
#pragma once

namespace {

Kernels make_table(const char* name) {
    Kernels k = {};
    k.name = name;
    k.layout = choose_layout;
    k.quantize = quantize;
    k.rows = rows;
    k.workspace_bytes = workspace_bytes;
    k.decode_row = decode_row;
    k.rms_norm = rms_norm;
    k.add = add;
    k.axpy = axpy;
    k.silu_mul = silu_mul;
    k.sigmoid = sigmoid;
    k.softmax = softmax;
    k.sigmoid_mul = sigmoid_mul;
    k.dot = dot;
    k.weigh = weigh;
    k.exp_total = exp_total;
    k.sum_from = sum_from;
    k.between = between;
    k.read_all = read_all;
    k.multiply_only = multiply_only;
    k.attend = attend;
    k.convolve = convolve;
    k.delta_keys = delta_keys;
    k.delta_head = delta_head;
    return k;
}

}  // namespace
