// The C interface of the library, which Python calls with ctypes.
#include <memory>

#include "code_product.h"
#include "delta.h"
#include "draw.h"
#include "experts.h"
#include "panel_product.h"
#include "planes.h"
#include "quantize.h"

using namespace graphcore;

namespace {

constexpr int MOST_THREADS = 1024;
constexpr int64_t BETWEEN_STEPS = 400000;  // nanoseconds for which workers spin until the next decode step

// Returns the process's only team of that size; two teams would compete for the cores. It is never destroyed, because
// threads cannot be joined while a process ends.
Team& team_of(int threads) {
    static pthread_mutex_t opening = PTHREAD_MUTEX_INITIALIZER;
    static Team* teams[MOST_THREADS];
    threads = std::min(threads, MOST_THREADS);
    const Lock one(opening);
    Team*& team = teams[threads - 1];
    if (!team) team = new (std::aligned_alloc(alignof(Team), sizeof(Team))) Team(threads);
    return *team;
}

// GOMP_parallel of the OpenMP library whose threads run torch's operations, or null.
using ParallelRegion = void (*)(void (*)(void*), void*, unsigned, unsigned);
std::atomic<ParallelRegion> region_of_torch{nullptr};
// omp_get_thread_num of that library: a thread keeps its number, and so its scratch memory in its core's cache.
using ThreadNumber = int (*)();
std::atomic<ThreadNumber> number_in_region{nullptr};

// The decode loop's jobs: a step after another, without torch's operations in between.
void carry_out_on_team(int threads, Job& job, int64_t linger = 0) {
    if (threads == 1) return Team(1).run(job, 0);  // no workers, so that any number of callers can run at once
    team_of(threads).run(job, linger);
}

// A job between operations of torch. It runs on the threads that torch's operations run on: two pools that take turns wait
// for each other's threads to leave the cores.
void carry_out(int threads, Job& job) {
    const ParallelRegion region = region_of_torch.load(std::memory_order_relaxed);
    if (threads == 1 || !region) return carry_out_on_team(threads, job);
    for (int phase = 0; phase < job.phases(); phase++) {
        SharedPhase shared{job, phase, job.deal(phase, threads), threads};
        region([](void* all) { static_cast<SharedPhase*>(all)->take_part(number_in_region.load(std::memory_order_relaxed)()); }, &shared, unsigned(threads), 0);
    }
}

// A job of one phase.
template <class Body>
class Loop final : public Job {
  public:
    Loop(int units, const Body& body) : units_(units), body_(body) {}
    int phases() const override { return 1; }
    Deal deal(int, int threads) const override { return Deal::even(units_, threads); }
    void carry_out(int, Range units, int) override { body_(units); }

  private:
    int units_;
    const Body& body_;
};

template <class Body>
void on_threads(int threads, int units, const Body& body) {
    Loop<Body> job(units, body);
    carry_out(threads, job);
}

struct FreeDeleter {
    void operator()(void* memory) const { std::free(memory); }
};

std::unique_ptr<void, FreeDeleter> scratch(size_t nbytes) {
    return std::unique_ptr<void, FreeDeleter>(std::aligned_alloc(64, (nbytes + 63) / 64 * 64));  // of whole cache lines
}

// Calls body(unit, work) for all units; `work` is memory for `floats` numbers.
template <class Body>
void on_threads_with(int threads, int units, int floats, const Body& body) {
    on_threads(threads, units, [&](Range mine) {
        const auto work = scratch(size_t(floats) * 4);
        for (int unit = mine.begin; unit < mine.end; unit++) body(unit, (float*)work.get());
    });
}

// A job that runs instructions in order, each as one phase.
class Step final : public Job {
  public:
    // memory: thread_nbytes bytes for each thread, which begin with the row_nbytes bytes of its row.
    Step(int threads, const Rows& rows, const Instruction* instructions, int count, uint8_t* memory, size_t thread_nbytes, size_t row_nbytes)
        : rows_(rows), instructions_(instructions), count_(count), memory_(scratch(size_t(threads) * sizeof(Scratch))), scratch_((Scratch*)memory_.get()) {
        for (int thread = 0; thread < threads; thread++) {
            new (scratch_ + thread) Scratch;
            scratch_[thread].row = (float*)(memory + thread * thread_nbytes);
            scratch_[thread].activations.x = (float*)(memory + thread * thread_nbytes + row_nbytes);
        }
    }

    int phases() const override { return count_; }
    Deal deal(int phase, int threads) const override { return deal_of(instructions_[phase], rows_, threads); }
    void enter(int phase, int thread) override { enter_instruction(instructions_[phase], rows_, scratch_[thread]); }
    void carry_out(int phase, Range units, int thread) override { run_units(instructions_[phase], rows_, units, scratch_[thread]); }

  private:
    const Rows& rows_;
    const Instruction* instructions_;
    int count_;
    std::unique_ptr<void, FreeDeleter> memory_;
    Scratch* scratch_;  // [threads]
};

}  // namespace

extern "C" {

// Makes jobs between torch's operations run on torch's threads; with null, on those of `team_of`.
void graphcore_share_threads(ParallelRegion region, ThreadNumber number) {
    number_in_region.store(number);
    region_of_torch.store(region);
}

// Returns the seconds that callers slept in jobs of the team of that size because another thread was late.
double graphcore_seconds_late(int threads) { return threads == 1 ? 0 : team_of(threads).seconds_late(); }

size_t graphcore_packed_nbytes(int format, int rows, int columns) { return matrix_nbytes(format, rows, columns); }

// Returns whether many tokens are multiplied faster with the unpacked matrix, in panels or by a library's dense product. AVX2 has no
// products of bf16, and its products of 16-bit integers do twice as much as those of float32.
bool graphcore_unpacks(int rounding) {
#if GRAPHCORE_AVX2
    return Rounding(rounding) == Rounding::NONE;
#else
    return Rounding(rounding) == Rounding::NONE || Rounding(rounding) == Rounding::WIDE;
#endif
}

// Packs a file's rows in the kernels' layout. raw: [rows, bytes of a raw row], with rows `stride` bytes apart. The last group
// is padded with zero rows.
void graphcore_pack(int threads, int format, int rows, int columns, const uint8_t* raw, size_t stride, uint8_t* packed) {
    const FormatOps& ops = format_ops(format);
    const size_t row_nbytes = size_t(columns / ops.raw_columns) * ops.raw_nbytes, group_nbytes = ops.group_nbytes(columns);
    const std::unique_ptr<void, FreeDeleter> zeros(rows % GROUP_ROWS ? std::calloc(row_nbytes, 1) : nullptr);
    on_threads(threads, num_groups(rows), [&](Range groups) {
        for (int group = groups.begin; group < groups.end; group++) {
            const uint8_t* lanes[GROUP_ROWS];
            for (int lane = 0; lane < GROUP_ROWS; lane++) {
                const int row = group * GROUP_ROWS + lane;
                lanes[lane] = row < rows ? raw + row * stride : static_cast<const uint8_t*>(zeros.get());
            }
            ops.pack_group(lanes, columns, packed + group * group_nbytes);
        }
    });
}

// Returns whether graphcore_quantize knows a format.
bool graphcore_can_quantize(int format) { return can_quantize(format); }

// Quantises dense weights to the blocks that a file stores; see quantize.h. dense: [weights] of dtype, a whole number of blocks.
void graphcore_quantize(int threads, int format, int dtype, int64_t weights, const uint8_t* dense, uint8_t* blocks, QuantizedSums* total) {
    *total = {};
    if (!weights) return;
    const int units = int((weights + UNIT_WEIGHTS - 1) / UNIT_WEIGHTS);
    const size_t dense_nbytes = size_t(UNIT_WEIGHTS) * format_nbytes(dtype);
    const size_t unit_nbytes = size_t(UNIT_WEIGHTS / ENCODINGS[format].columns) * ENCODINGS[format].nbytes;
    const auto memory = scratch(size_t(units) * sizeof(QuantizedSums));
    auto* sums = (QuantizedSums*)memory.get();
    on_threads(threads, units, [&](Range mine) {
        for (int unit = mine.begin; unit < mine.end; unit++) {
            const int count = int(std::min(int64_t(UNIT_WEIGHTS), weights - int64_t(unit) * UNIT_WEIGHTS));
            sums[unit] = quantize_unit(format, dtype, count, dense + unit * dense_nbytes, blocks + unit * unit_nbytes);
        }
    });
    for (int unit = 0; unit < units; unit++) total->add(sums[unit]);  // in order, whatever the number of threads
}

// Packs a file's rows of a format of levels in a GPU's planes; see planes.h.
void graphcore_pack_level_planes(int format, int rows, int columns, const uint8_t* raw, size_t stride, uint8_t* planes) {
    pack_level_planes(format, rows, columns, raw, stride, planes);
}

// Unpacks the whole matrix. dense: [rows, columns] of float32, fp16 or bf16.
void graphcore_unpack(int threads, const Matrix* matrix, int dtype, uint8_t* dense) {
    const FormatOps& ops = format_ops(matrix->format);
    const size_t row_nbytes = size_t(matrix->columns) * format_nbytes(dtype), group_nbytes = ops.group_nbytes(matrix->columns);
    on_threads(threads, num_groups(matrix->rows), [&](Range groups) {
        for (int group = groups.begin; group < groups.end; group++)
            ops.unpack_group(matrix->bytes + group * group_nbytes, matrix->columns, matrix->scale,
                             std::min(GROUP_ROWS, matrix->rows - group * GROUP_ROWS), dtype, dense + size_t(group) * GROUP_ROWS * row_nbytes);
    });
}

// Unpacks the rows with the given ids. dense: [count, columns] of dtype.
void graphcore_rows(const Matrix* matrix, const int64_t* ids, int count, int dtype, uint8_t* dense) {
    const FormatOps& ops = format_ops(matrix->format);
    const auto row = scratch(size_t(matrix->columns) * 4 + 64);
    const size_t group_nbytes = ops.group_nbytes(matrix->columns);
    for (int i = 0; i < count; i++) {
        const int lane = int(ids[i] % GROUP_ROWS);
        ops.unpack_row(matrix->bytes + ids[i] / GROUP_ROWS * group_nbytes, matrix->columns, matrix->scale, lane, (float*)row.get());
        narrow_row((const float*)row.get(), matrix->columns, dtype, dense + size_t(i) * matrix->columns * format_nbytes(dtype));
    }
}

// Computes products with the same x, in the codes of packed matrices. x: [tokens, columns] of dtype.
void graphcore_products(int threads, const uint8_t* x, int tokens, int columns, int dtype, int rounding, const ProductOutput* outputs, int count) {
    Activations activations;
    activations.rounding = Rounding(rounding);
    const int together = std::min(tokens, TOKENS_AT_ONCE);
    const auto memory = scratch(Activations::nbytes(together, columns));
    activations.place(memory.get(), together, columns);
    CodeProduct job(x, tokens, columns, dtype, outputs, count, activations);
    carry_out(threads, job);
}

// Returns whether graphcore_panels can be called here, and whether it can use AMX.
bool graphcore_has_panels() { return has_bf16_pairs(); }
bool graphcore_has_amx() { return has_amx(); }

// Computes products with the same x in panels, for packed matrices or dense bf16. x: [tokens, columns] of bf16; columns: a
// multiple of 32.
void graphcore_panels(int threads, bool uses_amx, const uint8_t* x, int tokens, int columns, const ProductOutput* outputs, int count) {
    if (!tokens || !count) return;
    const auto tiles = scratch(PanelProduct::tile_nbytes(uses_amx, tokens, columns));
    const auto work = scratch(threads * PanelProduct::work_nbytes(uses_amx, tokens));
    PanelProduct job(threads, uses_amx, x, tokens, columns, outputs, count, (uint8_t*)tiles.get(), (uint8_t*)work.get());
    carry_out(threads, job);
}

// Computes the attention of a chunk of one sequence, and writes its keys and values to the cache.
void graphcore_attend_chunk(int threads, const Chunk* chunk) {
    Seen seen(*chunk);
    const auto seen_memory = scratch(seen.nbytes(*chunk));
    seen.place(*chunk, seen_memory.get());
    const size_t floats = (tile_floats(*chunk, seen) + LANES - 1) / LANES * LANES;
    const auto work = scratch(threads * floats * 4);
    ChunkJob job(*chunk, seen, (float*)work.get(), floats);
    carry_out(threads, job);
}

// Norms, rotates, gates and adds the tokens of a chunk (token_rows.h).
void graphcore_norm_rows(int threads, const NormRows* a) {
    on_threads_with(threads, a->rows, a->columns, [&](int row, float* work) { norm_row(*a, row, work); });
}

void graphcore_rotate_rows(int threads, const RotateRows* a) {
    on_threads_with(threads, a->tokens, a->head_dim, [&](int token, float* work) { rotate_token(*a, token, work); });
}

void graphcore_gate_rows(int threads, const GateRows* a) {
    on_threads_with(threads, int((a->size + BLOCK - 1) / BLOCK), 2 * BLOCK, [&](int block, float* work) { gate_block(*a, block, work); });
}

void graphcore_add_rows(int threads, const AddRows* a) {
    on_threads_with(threads, int((a->size + BLOCK - 1) / BLOCK), BLOCK, [&](int block, float* work) { add_block(*a, block, work); });
}

// Runs many tokens through the heads of a Gated DeltaNet layer; `joined` need not be set.
void graphcore_delta_heads(int threads, const Delta* delta) {
    Delta a = *delta;
    const auto joined = scratch(size_t(a.sequences) * slab_tokens(a) * delta_channels(a) * 4);
    a.joined = (float*)joined.get();
    const size_t floats = delta_floats(a.key_dim, a.value_dim);
    const auto work = scratch(threads * floats * 4);
    DeltaJob job(a, (float*)work.get(), floats);
    carry_out(threads, job);
}

// Runs many tokens through a gated short convolution.
void graphcore_gated_convolution(int threads, const GatedConvolution* a) {
    on_threads(threads, gated_units(*a), [&](Range units) {
        for (int unit = units.begin; unit < units.end; unit++) run_gated_convolution(*a, unit);
    });
}

// Returns the bytes of scratch that sampling needs for each thread.
size_t graphcore_draw_nbytes(int vocab) { return draw_nbytes(vocab); }

// Draws a token for each row. memory: graphcore_draw_nbytes(vocab) bytes for each thread, at a multiple of 64 bytes.
void graphcore_draw(int threads, Draw* rows, int count, int vocab, uint8_t* memory) {
    DrawJob job(rows, count, vocab, memory);
    carry_out(threads, job);
}

// Runs many tokens through the experts that they chose.
void graphcore_experts(int threads, const ExpertsChunk* chunk) {
    Activations x, hidden;
    x.rounding = hidden.rounding = chunk->rounding;
    const auto memory = scratch(Activations::nbytes(chunk->tokens, chunk->gate.columns));
    const auto hidden_memory = scratch(Activations::nbytes(chunk->num_choices(), chunk->down.columns));
    x.place(memory.get(), chunk->tokens, chunk->gate.columns);
    hidden.place(hidden_memory.get(), chunk->num_choices(), chunk->down.columns);
    ExpertsJob job(*chunk, x, hidden);
    carry_out(threads, job);
}

// Runs a list of instructions once, for the rows of a program that have a token. counts: [rows], 0 or 1.  sequences: [rows],
// each row's sequence.
void graphcore_run(int threads, const int64_t* counts, const int64_t* sequences, int num_rows, const Instruction* instructions, int count, uint8_t* memory, size_t thread_nbytes, size_t row_nbytes) {
    const Rows rows(counts, sequences, num_rows);
    if (!rows.count) return;
    Step job(threads, rows, instructions, count, memory, thread_nbytes, row_nbytes);
    carry_out_on_team(threads, job, BETWEEN_STEPS);
}

// Returns the bytes of an instruction's activations in each thread's scratch, which follow the scratch's row.
size_t graphcore_activations_nbytes(int rows, int columns) { return Activations::nbytes(rows, columns); }

// Sums a buffer of 64-byte lines. Only reads take time, so its speed is the memory's bandwidth.
uint64_t graphcore_read(int threads, const uint64_t* words, size_t nbytes) {
    constexpr size_t PIECE_WORDS = 1 << 16;
    const size_t count = nbytes / 8;
    std::atomic<uint64_t> total{0};
    on_threads(threads, int((count + PIECE_WORDS - 1) / PIECE_WORDS), [&](Range pieces) {
        const size_t end = std::min(count, size_t(pieces.end) * PIECE_WORDS);
        uint64_t sum = 0;
        for (size_t i = size_t(pieces.begin) * PIECE_WORDS; i < end; i++) sum += words[i];
        total += sum;
    });
    return total;
}

// Returns the floats of scratch that attention over `slots` slots needs in each thread, for `rows` rows of one sequence.
size_t graphcore_attend_floats(int head_dim, int slots, int rows) { return attend_floats(head_dim, slots, rows); }

// Returns the floats of scratch that the delta rule needs in each thread.
size_t graphcore_delta_floats(int key_dim, int value_dim) { return delta_floats(key_dim, value_dim); }

}  // extern "C"
