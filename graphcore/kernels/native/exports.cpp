// What Python calls, by ctypes: plain functions on pointers and sizes.
//
// What runs between torch's own operations runs on OpenMP's threads, which are torch's: two teams would spin against
// each other. A decode step calls no torch operation and runs on a team of its own.
#include <omp.h>

#include <algorithm>
#include <memory>

#include "chunk.h"

using namespace graphcore;

namespace {

template <class Body>
void on_threads(int threads, Body&& body) {
#pragma omp parallel num_threads(threads)
    body(omp_get_thread_num(), omp_get_num_threads());
}

struct FreeDeleter {
    void operator()(void* memory) const { std::free(memory); }
};

std::unique_ptr<void, FreeDeleter> scratch(size_t nbytes) {
    return std::unique_ptr<void, FreeDeleter>(std::malloc(nbytes));
}

template <class T>
void store_as(const float* from, int count, T* to);
template <>
void store_as(const float* from, int count, float* to) { std::memcpy(to, from, size_t(count) * 4); }
template <>
void store_as(const float* from, int count, Bf16* to) {
    for (int i = 0; i < count; i++) to[i].bits = float_to_bf16(from[i]);
}
template <>
void store_as(const float* from, int count, Fp16* to) {
    for (int i = 0; i < count; i++) to[i].bits = float_to_half(from[i]);
}

void store_dtype(const float* from, int count, int dtype, uint8_t* to) {
    if (dtype == F32) return store_as(from, count, (float*)to);
    if (dtype == BF16) return store_as(from, count, (Bf16*)to);
    store_as(from, count, (Fp16*)to);
}

void load_dtype(const uint8_t* from, int count, int dtype, float* to) {
    if (dtype == F32) return std::memcpy(to, from, size_t(count) * 4), void();
    for (int i = 0; i < count; i++)
        to[i] = dtype == BF16 ? widen_one((const Bf16*)from + i) : widen_one((const Fp16*)from + i);
}

int element_nbytes(int dtype) { return dtype == F32 ? 4 : 2; }

}  // namespace

extern "C" {

void* graphcore_team(int threads) { return new Team(threads); }
void graphcore_team_free(void* team) { delete static_cast<Team*>(team); }

size_t graphcore_packed_nbytes(int format, int rows, int columns) { return matrix_nbytes(format, rows, columns); }

// Rows as the file has them, [rows, raw row bytes] and `stride` bytes apart, to the kernels' form; the last group's
// missing rows are zeros.
void graphcore_pack(int threads, int format, int rows, int columns, const uint8_t* raw, size_t stride, uint8_t* packed) {
    const FormatOps& ops = format_ops(format);
    const size_t row_nbytes = size_t(columns / ops.raw_columns) * ops.raw_nbytes, group_nbytes = ops.group_nbytes(columns);
    const std::unique_ptr<void, FreeDeleter> zeros(rows % LANES ? std::calloc(row_nbytes, 1) : nullptr);
    on_threads(threads, [&](int thread, int size) {
        const Range groups = share(num_groups(rows), thread, size);
        for (int group = groups.begin; group < groups.end; group++) {
            const uint8_t* lanes[LANES];
            for (int lane = 0; lane < LANES; lane++) {
                const int row = group * LANES + lane;
                lanes[lane] = row < rows ? raw + row * stride : static_cast<const uint8_t*>(zeros.get());
            }
            ops.pack_group(lanes, columns, packed + group * group_nbytes);
        }
    });
}

// The whole matrix, dense: [rows, columns] of float32, fp16 or bf16.
void graphcore_unpack(int threads, const Matrix* matrix, int dtype, uint8_t* dense) {
    const FormatOps& ops = format_ops(matrix->format);
    const size_t row_nbytes = size_t(matrix->columns) * element_nbytes(dtype), group_nbytes = ops.group_nbytes(matrix->columns);
    on_threads(threads, [&](int thread, int size) {
        const Range groups = share(num_groups(matrix->rows), thread, size);
        for (int group = groups.begin; group < groups.end; group++)
            ops.unpack_group(matrix->bytes + group * group_nbytes, matrix->columns, matrix->scale,
                             std::min(LANES, matrix->rows - group * LANES), dtype, dense + size_t(group) * LANES * row_nbytes);
    });
}

// Some rows, dense: [count, columns].
void graphcore_rows(const Matrix* matrix, const int64_t* ids, int count, int dtype, uint8_t* dense) {
    const FormatOps& ops = format_ops(matrix->format);
    const auto row = scratch(size_t(matrix->columns) * 4 + 64);
    const size_t group_nbytes = ops.group_nbytes(matrix->columns);
    for (int i = 0; i < count; i++) {
        const int lane = int(ids[i] % LANES);
        ops.unpack_row(matrix->bytes + ids[i] / LANES * group_nbytes, matrix->columns, matrix->scale, lane, (float*)row.get());
        store_dtype((const float*)row.get(), matrix->columns, dtype, dense + size_t(i) * matrix->columns * element_nbytes(dtype));
    }
}

// y = x @ matrix.T (+ bias):  x [tokens, columns], y [tokens, rows], both of dtype; bias [rows] float32 or null.
void graphcore_linear(int threads, const Matrix* matrix, const uint8_t* x, int tokens, int dtype, int rounding, const float* bias, uint8_t* y) {
    const int columns = matrix->columns, rows = matrix->rows, width = element_nbytes(dtype);
    Activations activations;
    activations.rounding = Rounding(rounding);
    const auto memory = scratch(Activations::nbytes(tokens, columns));
    activations.place(memory.get(), tokens, columns);
    on_threads(threads, [&](int thread, int size) {
        const Range mine = share(tokens, thread, size);
        for (int t = mine.begin; t < mine.end; t++) {
            float* row = activations.x + size_t(t) * activations.columns;
            std::memset(row + columns, 0, size_t(activations.columns - columns) * 4);
            load_dtype(x + size_t(t) * columns * width, columns, dtype, row);
            activations.finish(t);
        }
#pragma omp barrier
        const Range groups = share(num_groups(rows), thread, size);
        for (int group = groups.begin; group < groups.end; group++) {
            const int height = std::min(LANES, rows - group * LANES);
            for (int first = 0; first < tokens; first += TOKEN_TILE) {
                f32x16 totals[TOKEN_TILE];
                const int count = std::min(TOKEN_TILE, tokens - first);
                multiply_group(*matrix, group, activations, first, count, totals);
                for (int t = 0; t < count; t++) {
                    float out[LANES];
                    store(out, totals[t]);
                    if (bias) for (int lane = 0; lane < height; lane++) out[lane] += bias[group * LANES + lane];
                    store_dtype(out, height, dtype, y + (size_t(first + t) * rows + size_t(group) * LANES) * width);
                }
            }
        }
    });
}

// Attention of a chunk of one sequence, and its keys and values into the cache.
void graphcore_attend_chunk(int threads, const Chunk* chunk) {
    const Chunk& a = *chunk;
    Seen seen(a);
    const auto seen_memory = scratch(seen.nbytes(a));
    seen.place(a, seen_memory.get());
    const size_t floats = (tile_floats(a, seen) + LANES - 1) / LANES * LANES;
    const auto work = scratch(threads * floats * 4);
    on_threads(threads, [&](int thread, int size) {
        attend_chunk(a, seen, thread, size, (float*)work.get() + thread * floats, [] {
#pragma omp barrier
        });
    });
}

// Runs a list of instructions once; scratch: see graphcore_scratch_nbytes.
void graphcore_run(void* team, const Instruction* instructions, int count, uint8_t* memory, size_t thread_nbytes, size_t row_nbytes) {
    auto body = [&](int thread, Team& all) {
        uint8_t* mine = memory + thread * thread_nbytes;
        Scratch own;
        own.row = (float*)mine;
        own.activations.x = (float*)(mine + row_nbytes);
        for (int i = 0; i < count; i++) {
            run_instruction(instructions[i], thread, all.size(), own);
            if (i + 1 < count) all.barrier();
        }
    };
    static_cast<Team*>(team)->run(
        [](void* argument, int thread, Team& all) { (*static_cast<decltype(body)*>(argument))(thread, all); }, &body);
}

// Bytes that the activations of an instruction take in each thread's scratch, after its row.
size_t graphcore_activations_nbytes(int rows, int columns) { return Activations::nbytes(rows, columns); }

// Sums a buffer of 64-byte lines, so that every byte is read and nothing else is done: what memory gives at best.
uint64_t graphcore_read(int threads, const uint64_t* words, size_t nbytes) {
    const size_t lines = nbytes / 64;
    uint64_t total = 0;
#pragma omp parallel num_threads(threads) reduction(+ : total)
    {
        const size_t size = size_t(omp_get_num_threads()), thread = size_t(omp_get_thread_num());
        const size_t begin = lines * thread / size * 8, end = lines * (thread + 1) / size * 8;
        for (size_t i = begin; i < end; i++) total += words[i];
    }
    return total;
}

// Floats of each thread's row that attention over that many slots takes.
size_t graphcore_attend_floats(int head_dim, int slots) { return attend_floats(head_dim, slots); }

}  // extern "C"
