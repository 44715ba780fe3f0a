// Carries out the instructions of a decode step.
#include "step.h"

#include "delta.h"

namespace graphcore {
namespace {

// Reads one row of a table of any format as float32.
void read_row(const Matrix& table, int64_t row, float* to) {
    const size_t offset = size_t(row) * table.columns;
    if (table.format >= DENSE_FORMATS) {
        const FormatOps& ops = format_ops(table.format);
        const uint8_t* group = table.bytes + size_t(row / GROUP_ROWS) * ops.group_nbytes(table.columns);
        return ops.unpack_row(group, table.columns, table.scale, int(row % GROUP_ROWS), to);
    }
    for (int c = 0; c < table.columns; c++)
        to[c] = table.format == F32    ? widen_one((const float*)table.bytes + offset + c)
                : table.format == BF16 ? widen_one((const Bf16*)table.bytes + offset + c)
                                       : widen_one((const Fp16*)table.bytes + offset + c);
}

void run_embed(const Embed& a, Scratch& scratch) {
    read_row(a.table, *a.token_id, a.x);
    for (int c = 0; c < a.table.columns; c++) a.x[c] *= a.scale;
    if (!a.positions.bytes) return;
    read_row(a.positions, *a.position, scratch.row);
    for (int c = 0; c < a.table.columns; c++) a.x[c] += scratch.row[c];
}

// Normalises and rounds x into row `row` of the thread's own activations.
void take_in(const float* x, const Norm& norm, int columns, int row, Scratch& scratch) {
    float* to = scratch.activations.x + size_t(row) * scratch.activations.columns;
    normalise(norm, x, columns, to);
    std::memset(to + columns, 0, size_t(scratch.activations.columns - columns) * 4);
    scratch.activations.finish(row);
}

void prepare(Scratch& scratch, Rounding rounding, int rows, int columns) {
    scratch.activations.rounding = rounding;
    scratch.activations.place(scratch.activations.x, rows, columns);
}

inline f32x16 load_some(const float* from, int count) {
    if (count == LANES) return load<f32x16>(from);
    f32x16 value{};
    for (int lane = 0; lane < count; lane++) value[lane] = from[lane];
    return value;
}

inline void store_some(f32x16 value, int count, float* to) {
    if (count == LANES) return store(to, value);
    for (int lane = 0; lane < count; lane++) to[lane] = value[lane];
}

inline f32x16 product(const Matrix& matrix, int group, const float* bias, int height, const Scratch& scratch) {
    f32x16 total;
    multiply_group(matrix, group, scratch.activations, 0, 1, &total);
    return bias ? total + load_some(bias + group * GROUP_ROWS, height) : total;
}

void enter_project(const Project& a, Scratch& scratch) {
    prepare(scratch, a.rounding, 1, a.matrices[0].columns);
    take_in(a.x, a.norm, a.matrices[0].columns, 0, scratch);
}

// Returns how many matrices are multiplied one after another. The second of a gated pair is multiplied with the first.
int num_stacked(const Project& a) { return a.store == Store::GATED ? 1 : a.num_matrices; }

int groups_of(const Project& a) {
    int total = 0;
    for (int i = 0; i < num_stacked(a); i++) total += num_groups(a.matrices[i].rows);
    return total;
}

// Stores f(y), or adds y to what is there. y: the products of the matrix's rows in groups begin .. end - 1.
void put_products(const Project& a, int index, Range groups, Scratch& scratch) {
    const Matrix& matrix = a.matrices[index];
    for (int group = groups.begin; group < groups.end; group++) {
        const int height = std::min(GROUP_ROWS, matrix.rows - group * GROUP_ROWS);
        float* out = a.outs[index] + group * GROUP_ROWS;
        const f32x16 y = product(matrix, group, a.biases[index], height, scratch);
        store_some(a.store == Store::ADD ? y + load_some(out, height) : activate(a.activation, y), height, out);
    }
}

// Multiplies what put_products stored by the products of the second matrix's rows. Each matrix is read in one run: reads
// that go back and forth between two matrices reach less of the memory's speed.
void gate_products(const Project& a, Range groups, Scratch& scratch) {
    for (int group = groups.begin; group < groups.end; group++) {
        const int height = std::min(GROUP_ROWS, a.matrices[1].rows - group * GROUP_ROWS);
        float* out = a.outs[0] + group * GROUP_ROWS;
        store_some(load_some(out, height) * product(a.matrices[1], group, a.biases[1], height, scratch), height, out);
    }
}

void run_project(const Project& a, Range mine, Scratch& scratch) {
    for (int i = 0, before = 0; i < num_stacked(a); i++) {
        const int here = num_groups(a.matrices[i].rows);
        const Range groups{std::max(mine.begin - before, 0), std::min(mine.end - before, here)};
        before += here;
        put_products(a, i, groups, scratch);
        if (a.store == Store::GATED) gate_products(a, groups, scratch);
    }
}

// Attends with heads of one kv head, which share its keys.
void run_attend(const Attend& a, Range heads, Scratch& scratch) {
    switch (a.cache_format) {
        case F32: return attend_heads<float>(a, heads.begin, heads.end, scratch.row);
        case F16: return attend_heads<Fp16>(a, heads.begin, heads.end, scratch.row);
        default: return attend_heads<Bf16>(a, heads.begin, heads.end, scratch.row);
    }
}

void run_add_norm(const AddNorm& a, Scratch& scratch) {
    normalise(a.norm, a.y, a.dim, scratch.row);
    for (int i = 0; i < a.dim; i++) a.x[i] = (a.puts ? 0.0f : a.x[i]) + scratch.row[i];
}

void choose_part(const Choose& a, int part) {
    const Range mine = share(a.vocab, part, CHOICE_PARTS);
    float best = -INFINITY;
    int64_t index = mine.begin;
    int i = mine.begin;
    for (; i + PART_LANES <= mine.end; i += PART_LANES) {
        const float most = largest(load<FloatPart>(a.logits + i));
        if (!(most > best)) continue;
        best = most;
        for (index = i; a.logits[index] != most;) index++;
    }
    for (; i < mine.end; i++)
        if (a.logits[i] > best) best = a.logits[i], index = i;
    a.best[part] = best;
    a.best_index[part] = index;
}

void run_advance(const Advance& a) {
    int winner = 0;
    for (int other = 1; other < CHOICE_PARTS; other++)
        if (a.best[other] > a.best[winner]) winner = other;
    *a.chosen = *a.token_id = a.best_index[winner];
    ++*a.position;
}

void run_route(const Route& a, Scratch& scratch) {
    float* left = scratch.row;
    std::memcpy(left, a.logits, size_t(a.experts) * 4);
    if (a.over_all) softmax(left, a.experts, nullptr);
    for (int k = 0; k < a.used; k++) {
        const int best = int(std::max_element(left, left + a.experts) - left);
        a.chosen[k] = best;
        a.weights[k] = left[best];
        left[best] = -INFINITY;
    }
    if (!a.over_all) softmax(a.weights, a.used, nullptr);
    if (a.scales)
        for (int k = 0; k < a.used; k++) a.weights[k] *= a.scales[a.chosen[k]];
}

Matrix matrix_at(const Matrix& first, int place) {
    const size_t tail = has_tensor_scale(first.format) ? TAIL_NBYTES : 0;  // each expert ends with the tensor's one scale
    Matrix matrix = first;
    matrix.bytes += place * (matrix_nbytes(first.format, first.rows, first.columns) + tail);
    return matrix;
}

// Joins the gate and up products of an expert.
inline f32x16 gated_features(const ExpertsUp& a, f32x16 gate, f32x16 up) {
    return a.activation == Activation::CLAMPED_SWIGLU ? clamped_swiglu(gate, up, a.limit, a.alpha) : activate(a.activation, gate) * up;
}

void enter_experts_up(const ExpertsUp& a, Scratch& scratch) {
    prepare(scratch, a.rounding, 1, a.gate.columns);
    take_in(a.x, a.norm, a.gate.columns, 0, scratch);
}

// Returns the bias of an expert's group of rows, or null.
inline const float* bias_at(const float* biases, int rows, int expert, int group) {
    return biases ? biases + size_t(expert) * rows + group * GROUP_ROWS : nullptr;
}

// Carries out units begin .. end - 1, which are numbered expert by expert, as runs of groups of one expert. Each matrix is
// then read in one run.
template <class Body>
void for_each_expert(Range units, int groups, const Body& body) {
    for (int unit = units.begin, next; unit < units.end; unit = next) {
        next = std::min(units.end, (unit / groups + 1) * groups);
        body(unit / groups, Range{unit % groups, unit % groups + next - unit});
    }
}

void run_experts_up(const ExpertsUp& a, Range mine, Scratch& scratch) {
    const int rows = a.gate.rows;
    for_each_expert(mine, num_groups(rows), [&](int k, Range groups) {
        float* hidden = a.hidden + size_t(k) * rows;
        const auto for_each_group = [&](const Matrix& first, const float* biases, const auto& put) {
            const Matrix matrix = matrix_at(first, a.places[k]);
            for (int group = groups.begin; group < groups.end; group++) {
                const int height = std::min(GROUP_ROWS, rows - group * GROUP_ROWS);
                f32x16 y;
                multiply_group(matrix, group, scratch.activations, 0, 1, &y);
                if (const float* bias = bias_at(biases, rows, a.chosen[k], group)) y += load_some(bias, height);
                put(y, height, hidden + group * GROUP_ROWS);
            }
        };
        for_each_group(a.gate, a.gate_bias, store_some);
        for_each_group(a.up, a.up_bias, [&](f32x16 up, int height, float* to) {
            store_some(gated_features(a, load_some(to, height), up), height, to);
        });
    });
}

void enter_experts_down(const ExpertsDown& a, Scratch& scratch) {
    const int columns = a.down.columns;
    prepare(scratch, a.rounding, a.used, columns);
    const Norm none{NormKind::NONE, 0, nullptr, nullptr};
    for (int k = 0; k < a.used; k++) take_in(a.hidden + size_t(k) * columns, none, columns, k, scratch);
}

// Adds up the experts' answers for some groups of rows at a time, so that the rows of an expert are read in one run.
void run_experts_down(const ExpertsDown& a, Range mine, Scratch& scratch) {
    constexpr int GROUPS = 32;
    const int rows = a.down.rows;
    for (int first = mine.begin; first < mine.end; first += GROUPS) {
        const int end = std::min(first + GROUPS, mine.end);
        const auto height_of = [&](int group) { return std::min(GROUP_ROWS, rows - group * GROUP_ROWS); };
        f32x16 totals[GROUPS] = {};
        for (int k = 0; k < a.used; k++) {
            const Matrix matrix = matrix_at(a.down, a.places[k]);
            for (int group = first; group < end; group++) {
                f32x16 y;
                multiply_group(matrix, group, scratch.activations, k, 1, &y);
                if (const float* bias = bias_at(a.bias, rows, a.chosen[k], group)) y += load_some(bias, height_of(group));
                totals[group - first] += splat<f32x16>(a.weights[k]) * y;
            }
        }
        for (int group = first; group < end; group++) {
            float* out = a.x + group * GROUP_ROWS;
            const f32x16 total = totals[group - first];
            store_some(a.puts ? total : load_some(out, height_of(group)) + total, height_of(group), out);
        }
    }
}

constexpr int ELEMENTS = 1024;  // elements of a unit of work

int units_of(const Elementwise& a) { return (a.size + ELEMENTS - 1) / ELEMENTS; }

FloatPart element(const Elementwise& a, FloatPart x, FloatPart y) {
    switch (a.elements) {
        case Elements::GATE: return activate_part(a.activation, x) * y;
        case Elements::SCALE: return x * y;
        case Elements::ADD: return x + splat(a.factor) * y;
        default: return splat(a.factor) * hyperbolic_tangent(x / splat(a.factor));
    }
}

void run_elementwise(const Elementwise& a, Range mine) {
    const float* other = a.b ? a.b : a.a;
    const bool is_scale = a.elements == Elements::SCALE;
    const FloatPart scale = is_scale ? activate_part(a.activation, splat(a.a[0])) : FloatPart{};
    const int end = std::min(mine.end * ELEMENTS, a.size);
    int i = mine.begin * ELEMENTS;
    for (; i + PART_LANES <= end; i += PART_LANES) store(a.out + i, element(a, is_scale ? scale : load<FloatPart>(a.a + i), load<FloatPart>(other + i)));
    FloatPart x{}, y{};
    for (int lane = 0; i + lane < end; lane++) x[lane] = is_scale ? scale[lane] : a.a[i + lane], y[lane] = other[i + lane];
    const FloatPart rest = element(a, x, y);
    for (int lane = 0; i + lane < end; lane++) a.out[i + lane] = rest[lane];
}

}  // namespace

Deal deal_of(const Instruction& instruction, int threads) {
    const void* a = instruction.arguments;
    switch (instruction.kind) {
        case Kind::PROJECT: return Deal::even(groups_of(*(const Project*)a), threads);
        case Kind::ATTEND: {
            const auto& attend = *(const Attend*)a;
            return {attend.heads, attend.heads / attend.kv_heads};
        }
        case Kind::CHOOSE: return {CHOICE_PARTS, CHOICE_PARTS / PORTIONS};
        case Kind::EXPERTS_UP: return Deal::even(num_groups(((const ExpertsUp*)a)->gate.rows) * ((const ExpertsUp*)a)->used, threads);
        case Kind::EXPERTS_DOWN: return Deal::even(num_groups(((const ExpertsDown*)a)->down.rows), threads);
        case Kind::ELEMENTWISE: return Deal::even(units_of(*(const Elementwise*)a), threads);
        case Kind::CONVOLVE: return Deal::even(convolve_units(*(const Delta*)a), threads);
        case Kind::DELTA_RULE: return Deal::even(rule_units(*(const Delta*)a), threads);
        default: return {};
    }
}

void enter_instruction(const Instruction& instruction, Scratch& scratch) {
    const void* a = instruction.arguments;
    switch (instruction.kind) {
        case Kind::PROJECT: return enter_project(*(const Project*)a, scratch);
        case Kind::EXPERTS_UP: return enter_experts_up(*(const ExpertsUp*)a, scratch);
        case Kind::EXPERTS_DOWN: return enter_experts_down(*(const ExpertsDown*)a, scratch);
        default: return;
    }
}

void run_units(const Instruction& instruction, Range units, Scratch& scratch) {
    const void* a = instruction.arguments;
    switch (instruction.kind) {
        case Kind::EMBED: return run_embed(*(const Embed*)a, scratch);
        case Kind::PROJECT: return run_project(*(const Project*)a, units, scratch);
        case Kind::ATTEND: return run_attend(*(const Attend*)a, units, scratch);
        case Kind::ADD_NORM: return run_add_norm(*(const AddNorm*)a, scratch);
        case Kind::CHOOSE:
            for (int part = units.begin; part < units.end; part++) choose_part(*(const Choose*)a, part);
            return;
        case Kind::ADVANCE: return run_advance(*(const Advance*)a);
        case Kind::ROUTE: return run_route(*(const Route*)a, scratch);
        case Kind::EXPERTS_UP: return run_experts_up(*(const ExpertsUp*)a, units, scratch);
        case Kind::EXPERTS_DOWN: return run_experts_down(*(const ExpertsDown*)a, units, scratch);
        case Kind::ELEMENTWISE: return run_elementwise(*(const Elementwise*)a, units);
        case Kind::CONVOLVE: return run_convolve(*(const Delta*)a, 0, units);
        case Kind::DELTA_RULE: return run_rule(*(const Delta*)a, 0, units, scratch.row);
    }
}

}  // namespace graphcore
