// Executes the instructions of a decode step.
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

void run_embed(const Embed& a, int row, Scratch& scratch) {
    float* x = a.x.at(row);
    read_row(a.table, a.token_ids[row], x);
    for (int c = 0; c < a.table.columns; c++) x[c] *= a.scale;
    if (!a.positions.bytes) return;
    read_row(a.positions, a.starts[row], scratch.row);
    for (int c = 0; c < a.table.columns; c++) x[c] += scratch.row[c];
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

// Indices of the thread's activations, in order.
constexpr int IN_ORDER[MOST_ROWS] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

// Multiplies one group of the matrix with some of the thread's activations. results: one for each.
inline void products(const Matrix& matrix, int group, const float* bias, int height, const Scratch& scratch, const int* which, int count, f32x16* results) {
    multiply_group(matrix, group, scratch.activations, which, count, results);
    if (!bias) return;
    const f32x16 added = load_some(bias + group * GROUP_ROWS, height);
    for (int i = 0; i < count; i++) results[i] += added;
}

void enter_project(const Project& a, const Rows& rows, Scratch& scratch) {
    const int columns = a.matrices[0].columns;
    prepare(scratch, a.rounding, rows.count, columns);
    for (int i = 0; i < rows.count; i++) take_in(a.x.at(rows.index[i]), a.norm, columns, i, scratch);
}

// Returns how many matrices are multiplied one after another. The second of a gated pair is multiplied with the first.
int num_stacked(const Project& a) { return a.store == Store::GATED ? 1 : a.num_matrices; }

int groups_of(const Project& a) {
    int total = 0;
    for (int i = 0; i < num_stacked(a); i++) total += num_groups(a.matrices[i].rows);
    return total;
}

// Calls put(product, height, out) for each row that runs and each of the matrix's groups begin .. end - 1. out: place of the
// group in the row's part of `outs`.
template <class Put>
inline void for_products(const Project& a, const Rows& rows, int index, Range groups, const Scratch& scratch, PerRow<float> outs, const Put& put) {
    const Matrix& matrix = a.matrices[index];
    f32x16 results[MOST_ROWS];
    for (int group = groups.begin; group < groups.end; group++) {
        const int height = std::min(GROUP_ROWS, matrix.rows - group * GROUP_ROWS);
        products(matrix, group, a.biases[index], height, scratch, IN_ORDER, rows.count, results);
        for (int r = 0; r < rows.count; r++) put(results[r], height, outs.at(rows.index[r]) + group * GROUP_ROWS);
    }
}

// Each matrix of a gated pair is read sequentially: alternating reads of two matrices reach less bandwidth.
void run_project(const Project& a, const Rows& rows, Range mine, Scratch& scratch) {
    for (int i = 0, before = 0; i < num_stacked(a); i++) {
        const int here = num_groups(a.matrices[i].rows);
        const Range groups{std::max(mine.begin - before, 0), std::min(mine.end - before, here)};
        before += here;
        for_products(a, rows, i, groups, scratch, a.outs[i], [&](f32x16 y, int height, float* out) {
            if (a.store != Store::ADD) y = activate(a.activation, y);
            if (a.factor) y *= splat<f32x16>(a.factor);
            store_some(a.store == Store::ADD ? y + load_some(out, height) : y, height, out);
        });
        if (a.store != Store::GATED) continue;
        for_products(a, rows, 1, groups, scratch, a.outs[0], [&](f32x16 y, int height, float* out) {
            store_some(load_some(out, height) * y, height, out);
        });
    }
}

// Computes attention for query heads of one row that share a kv head.
void run_attend(const Attend& a, const Rows& rows, Range units, Scratch& scratch) {
    const int nth = units.begin / a.heads;
    const int first = units.begin - nth * a.heads, last = units.end - nth * a.heads;
    attend_heads(a, rows, nth, first, last, scratch.row);
}

void run_add_norm(const AddNorm& a, int row, int part, Scratch& scratch) {
    const size_t first = size_t(part) * a.dim;
    float* x = a.x.at(row) + first;
    normalise(a.norm, a.y.at(row) + first, a.dim, scratch.row);
    for (int i = 0; i < a.dim; i++) x[i] = (a.puts ? 0.0f : x[i]) + scratch.row[i];
}

void choose_part(const Choose& a, int row, int part) {
    const Range mine = share(a.vocab, part, CHOICE_PARTS);
    const float* logits = a.logits.at(row);
    FloatPart most = splat(-INFINITY);
    IntPart bad{};
    int i = mine.begin, index = mine.begin;
    for (; i + PART_LANES <= mine.end; i += PART_LANES) {
        const FloatPart values = load<FloatPart>(logits + i);
        most = larger(most, values);
        bad |= (values - values) != splat(0.0f);
    }
    float best = largest(most);
    bool is_finite = sum(bad) == 0;
    for (; i < mine.end; i++) best = std::max(best, logits[i]), is_finite &= std::isfinite(logits[i]);
    while (is_finite && index < mine.end && logits[index] != best) index++;
    a.best[row * CHOICE_PARTS + part] = is_finite ? best : INFINITY;  // the largest value, so that Advance chooses -1
    a.best_index[row * CHOICE_PARTS + part] = is_finite ? index : -1;
}

void run_advance(const Advance& a, int row) {
    const float* best = a.best + row * CHOICE_PARTS;
    int winner = 0;
    for (int other = 1; other < CHOICE_PARTS; other++)
        if (best[other] > best[winner]) winner = other;
    a.chosen[row] = a.best_index[row * CHOICE_PARTS + winner];
    a.token_ids[row] = std::max<int64_t>(0, a.chosen[row]);
    ++a.starts[row];
}

// Lowers the scores of all experts to -infinity except those of the used groups. sums: [groups], overwritten.
void keep_best_groups(const Route& a, float* ranked, float* sums) {
    const int size = a.experts / a.groups;
    for (int group = 0; group < a.groups; group++) {
        const float* scores = ranked + group * size;
        float best = -INFINITY, second = -INFINITY;
        for (int i = 0; i < size; i++) {
            second = std::max(second, std::min(best, scores[i]));
            best = std::max(best, scores[i]);
        }
        sums[group] = a.ranked_by > 1 ? best + second : best;
    }
    for (int unused = a.groups - a.used_groups; unused > 0; unused--) {
        int worst = 0;
        for (int group = 1; group < a.groups; group++)
            if (sums[group] <= sums[worst]) worst = group;
        sums[worst] = INFINITY;
        std::fill_n(ranked + worst * size, size, -INFINITY);
    }
}

// Chooses one row's experts by score plus bias; their weights are their scores.
void choose_by_scores(const Route& a, int row, Scratch& scratch) {
    const float* logits = a.logits.at(row);
    float *scores = scratch.row, *ranked = scores + a.experts + PART_LANES, *sums = ranked + a.experts;
    std::memcpy(scores, logits, size_t(a.experts) * 4);
    if (a.function == Scores::SOFTMAX) softmax(scores, a.experts, nullptr);
    else
        for (int i = 0; i < a.experts; i += PART_LANES) store(scores + i, activate_part(Activation::SIGMOID, load<FloatPart>(scores + i)));
    for (int i = 0; i < a.experts; i++) ranked[i] = scores[i] + (a.bias ? a.bias[i] : 0.0f);
    if (a.groups > 1) keep_best_groups(a, ranked, sums);
    float* weights = a.weights + size_t(row) * a.used;
    int32_t* chosen = a.chosen + size_t(row) * a.used;
    float total = a.eps;
    for (int k = 0; k < a.used; k++) {
        chosen[k] = int(std::max_element(ranked, ranked + a.experts) - ranked);
        ranked[chosen[k]] = -INFINITY;
        weights[k] = scores[chosen[k]];
        total += weights[k];
    }
    for (int k = 0; k < a.used; k++) weights[k] *= a.factor / (a.normalises ? total : 1.0f);
}

void choose_experts(const Route& a, int row, Scratch& scratch) {
    if (a.function != Scores::NONE) return choose_by_scores(a, row, scratch);
    float *left = scratch.row, *weights = a.weights + size_t(row) * a.used;
    int32_t* chosen = a.chosen + size_t(row) * a.used;
    std::memcpy(left, a.logits.at(row), size_t(a.experts) * 4);
    if (a.over_all) softmax(left, a.experts, nullptr);
    for (int k = 0; k < a.used; k++) {
        const int best = int(std::max_element(left, left + a.experts) - left);
        chosen[k] = best;
        weights[k] = left[best];
        left[best] = -INFINITY;
    }
    if (!a.over_all) softmax(weights, a.used, nullptr);
    if (a.scales)
        for (int k = 0; k < a.used; k++) weights[k] *= a.scales[chosen[k]];
}

int32_t expert_of(const int32_t* chosen, int used, const Rows& rows, int choice) {
    return chosen[size_t(rows.index[choice / used]) * used + choice % used];
}

// Groups the chosen experts of all rows by expert.
void share_experts(const Route& a, const Rows& rows) {
    const int total = rows.count * a.used;
    const auto expert = [&](int choice) { return expert_of(a.chosen, a.used, rows, choice); };
    for (int i = 0; i < total; i++) a.sharing.choices[i] = i;
    std::sort(a.sharing.choices, a.sharing.choices + total, [&](int32_t one, int32_t other) {
        return expert(one) != expert(other) ? expert(one) < expert(other) : one < other;
    });
    int count = 0;
    for (int i = 0; i < total; i++)
        if (i == 0 || expert(a.sharing.choices[i]) != expert(a.sharing.choices[i - 1])) a.sharing.begins[count++] = i;
    a.sharing.begins[count] = total;
    *a.sharing.count = count;
}

void run_route(const Route& a, const Rows& rows, Scratch& scratch) {
    for (int i = 0; i < rows.count; i++) choose_experts(a, rows.index[i], scratch);
    share_experts(a, rows);
}

void enter_experts_up(const ExpertsUp& a, const Rows& rows, Scratch& scratch) {
    prepare(scratch, a.rounding, rows.count, a.gate.columns);
    for (int i = 0; i < rows.count; i++) take_in(a.x.at(rows.index[i]), a.norm, a.gate.columns, i, scratch);
}

// One chosen expert: its id, the place of its matrices, and the choices of it.
struct Chosen {
    int expert, place, count;
    const int32_t* choices;  // [count]
};

template <class Experts>
Chosen chosen_at(const Experts& a, const Rows& rows, int nth) {
    const int begin = a.sharing.begins[nth];
    const int32_t* choices = a.sharing.choices + begin;
    const int expert = expert_of(a.chosen, a.used, rows, choices[0]), place = expert_of(a.places, a.used, rows, choices[0]);
    return {expert, place, a.sharing.begins[nth + 1] - begin, choices};
}

// Multiplies groups begin .. end - 1 of an expert's matrix with some of the thread's activations, and calls
// put(i, product, height, group) for the i-th of them.
template <class Put>
inline void for_expert(const Matrix& first, const float* biases, const Chosen& one, Range groups, const Scratch& scratch, const int* which, const Put& put) {
    const Matrix matrix = matrix_at(first, one.place);
    const float* bias = biases ? biases + size_t(one.expert) * matrix.rows : nullptr;
    f32x16 results[MOST_ROWS];
    for (int group = groups.begin; group < groups.end; group++) {
        const int height = std::min(GROUP_ROWS, matrix.rows - group * GROUP_ROWS);
        products(matrix, group, bias, height, scratch, which, one.count, results);
        for (int i = 0; i < one.count; i++) put(i, results[i], height, group);
    }
}

// Units are numbered expert by expert, and executed as ranges of groups of one expert, so that each matrix is read sequentially.
void run_experts_up(const ExpertsUp& a, const Rows& rows, Range mine, Scratch& scratch) {
    const int groups = num_groups(a.gate.rows);
    for (int unit = mine.begin, next; unit < mine.end; unit = next) {
        next = std::min(mine.end, (unit / groups + 1) * groups);
        const Range here{unit % groups, unit % groups + next - unit};
        const Chosen one = chosen_at(a, rows, unit / groups);
        if (one.place < 0) continue;
        int which[MOST_ROWS];
        float* hidden[MOST_ROWS];
        for (int i = 0; i < one.count; i++) {
            which[i] = one.choices[i] / a.used;
            hidden[i] = a.hidden.at(rows.index[which[i]]) + size_t(one.choices[i] % a.used) * a.gate.rows;
        }
        for_expert(a.gate, a.gate_bias, one, here, scratch, which, [&](int i, f32x16 gate, int height, int group) {
            store_some(gate, height, hidden[i] + group * GROUP_ROWS);
        });
        for_expert(a.up, a.up_bias, one, here, scratch, which, [&](int i, f32x16 up, int height, int group) {
            float* to = hidden[i] + group * GROUP_ROWS;
            store_some(gated_features(a.activation, load_some(to, height), up, a.limit, a.alpha), height, to);
        });
    }
}

void enter_experts_down(const ExpertsDown& a, const Rows& rows, Scratch& scratch) {
    const int columns = a.down.columns;
    prepare(scratch, a.rounding, rows.count * a.used, columns);
    const Norm none{NormKind::NONE, 0, nullptr, nullptr};
    for (int choice = 0; choice < rows.count * a.used; choice++)
        if (expert_of(a.places, a.used, rows, choice) >= 0)
            take_in(a.hidden.at(rows.index[choice / a.used]) + size_t(choice % a.used) * columns, none, columns, choice, scratch);
}

// Sums the experts' outputs for DOWN_GROUPS groups of rows at a time, so that the rows of an expert are read sequentially.
void run_experts_down(const ExpertsDown& a, const Rows& rows, Range mine, Scratch& scratch) {
    const size_t stride = size_t(GROUP_ROWS) * (a.answers ? num_groups(a.down.rows) : DOWN_GROUPS);
    for (int first = mine.begin; first < mine.end; first += DOWN_GROUPS) {
        const Range here{first, std::min(first + DOWN_GROUPS, mine.end)};
        float* answers = a.answers ? a.answers + first * GROUP_ROWS : scratch.row;  // of `first`; each choice's are `stride` apart
        for (int nth = 0; nth < *a.sharing.count; nth++) {
            const Chosen one = chosen_at(a, rows, nth);
            if (one.place < 0) continue;
            for_expert(a.down, a.bias, one, here, scratch, one.choices, [&](int i, f32x16 y, int, int group) {
                store(answers + one.choices[i] * stride + (group - first) * GROUP_ROWS, y);
            });
        }
        if (a.is_last && !*a.is_last) continue;
        for (int i = 0; i < rows.count; i++)
            for (int group = here.begin; group < here.end; group++) {
                const int height = std::min(GROUP_ROWS, a.down.rows - group * GROUP_ROWS);
                const float* weights = a.weights + size_t(rows.index[i]) * a.used;
                f32x16 total{};
                for (int k = 0; k < a.used; k++)
                    total += splat<f32x16>(weights[k]) * load<f32x16>(answers + (i * a.used + k) * stride + (group - first) * GROUP_ROWS);
                float* out = a.x.at(rows.index[i]) + group * GROUP_ROWS;
                store_some(a.puts ? total : load_some(out, height) + total, height, out);
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

void run_elements(const Elementwise& a, int row, int unit) {
    const float *one = a.a.at(row), *other = a.b ? a.b.at(row) : one;
    float* out = a.out.at(row);
    const bool is_scale = a.elements == Elements::SCALE;
    const FloatPart scale = is_scale ? activate_part(a.activation, splat(one[0])) : FloatPart{};
    const int end = std::min((unit + 1) * ELEMENTS, a.size);
    int i = unit * ELEMENTS;
    for (; i + PART_LANES <= end; i += PART_LANES) store(out + i, element(a, is_scale ? scale : load<FloatPart>(one + i), load<FloatPart>(other + i)));
    FloatPart x{}, y{};
    for (int lane = 0; i + lane < end; lane++) x[lane] = is_scale ? scale[lane] : one[i + lane], y[lane] = other[i + lane];
    const FloatPart rest = element(a, x, y);
    for (int lane = 0; i + lane < end; lane++) out[i + lane] = rest[lane];
}

int units_of(const Reorder& a) { return (a.size + ELEMENTS - 1) / ELEMENTS; }

void run_reorder(const Reorder& a, int row, int unit) {
    const float* x = a.x.at(row);
    float* out = a.out.at(row);
    const int end = std::min((unit + 1) * ELEMENTS, a.size);
    for (int i = unit * ELEMENTS; i < end; i++) out[i] = x[a.order[i]];
}

int units_of(const ProjectHeads& a) { return a.heads * num_groups(a.matrix.rows); }

// Units are numbered head by head. The rows' inputs of a head are rounded once for all of its units here.
void run_project_heads(const ProjectHeads& a, const Rows& rows, Range mine, Scratch& scratch) {
    const int groups = num_groups(a.matrix.rows), columns = a.matrix.columns, width = a.prefix_dim + a.matrix.rows;
    const Norm none{NormKind::NONE, 0, nullptr, nullptr};
    f32x16 results[MOST_ROWS];
    for (int unit = mine.begin, next; unit < mine.end; unit = next) {
        const int head = unit / groups;
        next = std::min(mine.end, (head + 1) * groups);
        const Matrix matrix = matrix_at(a.matrix, head);
        for (int i = 0; i < rows.count; i++) {
            const int row = rows.index[i];
            take_in(a.x.at(row) + size_t(head) * columns, none, columns, i, scratch);
            if (unit % groups == 0 && a.prefix_dim)
                std::memcpy(a.out.at(row) + size_t(head) * width, a.prefix.at(row) + size_t(head) * a.prefix_dim, size_t(a.prefix_dim) * 4);
        }
        for (int group = unit % groups; group < unit % groups + next - unit; group++) {
            const int height = std::min(GROUP_ROWS, matrix.rows - group * GROUP_ROWS);
            products(matrix, group, nullptr, height, scratch, IN_ORDER, rows.count, results);
            for (int i = 0; i < rows.count; i++)
                store_some(results[i], height, a.out.at(rows.index[i]) + size_t(head) * width + a.prefix_dim + group * GROUP_ROWS);
        }
    }
}

// Calls function(row, part) for each unit, where every row has `parts` units.
template <class Function>
void by_row(const Rows& rows, Range units, int parts, const Function& function) {
    for (int unit = units.begin; unit < units.end; unit++) function(rows.index[unit / parts], unit % parts);
}

// Calls function(row, part) for each row of each unit's sequence, in order, where every sequence has `parts` units.
template <class Function>
void by_sequence(const Rows& rows, Range units, int parts, const Function& function) {
    for (int unit = units.begin; unit < units.end; unit++)
        for (int i = rows.begins[unit / parts]; i < rows.begins[unit / parts + 1]; i++) function(rows.index[i], unit % parts);
}

}  // namespace

Deal deal_of(const Instruction& instruction, const Rows& rows, int threads) {
    const void* a = instruction.arguments;
    const auto of_rows = [&](int parts) { return Deal::even(rows.count * parts, threads); };
    const auto of_sequences = [&](int parts) { return Deal::even(rows.num_sequences * parts, threads); };
    switch (instruction.kind) {
        case Kind::EMBED:
        case Kind::ADVANCE: return of_rows(1);
        case Kind::ADD_NORM: return of_rows(((const AddNorm*)a)->parts);
        case Kind::PROJECT: return Deal::even(groups_of(*(const Project*)a), threads);
        case Kind::ATTEND: {
            const auto& attend = *(const Attend*)a;
            return {rows.count * attend.heads, attend.heads / attend.kv_heads};
        }
        case Kind::CHOOSE: return {rows.count * CHOICE_PARTS, CHOICE_PARTS / PORTIONS};
        case Kind::ROUTE: return {};
        case Kind::EXPERTS_UP: return Deal::even(num_groups(((const ExpertsUp*)a)->gate.rows) * *((const ExpertsUp*)a)->sharing.count, threads);
        case Kind::EXPERTS_DOWN: return Deal::even(num_groups(((const ExpertsDown*)a)->down.rows), threads);
        case Kind::ELEMENTWISE: return of_rows(units_of(*(const Elementwise*)a));
        case Kind::CONVOLVE: return of_sequences(channel_blocks(delta_channels(*(const Delta*)a)));
        case Kind::DELTA_RULE: return of_sequences(((const Delta*)a)->heads);
        case Kind::REORDER: return of_rows(units_of(*(const Reorder*)a));
        case Kind::GATED_CONVOLUTION: return of_sequences(channel_blocks(((const GatedConvolution*)a)->channels));
        case Kind::PROJECT_HEADS: return Deal::even(units_of(*(const ProjectHeads*)a), threads);
    }
    return {};
}

void enter_instruction(const Instruction& instruction, const Rows& rows, Scratch& scratch) {
    const void* a = instruction.arguments;
    switch (instruction.kind) {
        case Kind::PROJECT: return enter_project(*(const Project*)a, rows, scratch);
        case Kind::EXPERTS_UP: return enter_experts_up(*(const ExpertsUp*)a, rows, scratch);
        case Kind::EXPERTS_DOWN: return enter_experts_down(*(const ExpertsDown*)a, rows, scratch);
        case Kind::PROJECT_HEADS: return prepare(scratch, ((const ProjectHeads*)a)->rounding, rows.count, ((const ProjectHeads*)a)->matrix.columns);
        default: return;
    }
}

void run_units(const Instruction& instruction, const Rows& rows, Range units, Scratch& scratch) {
    const void* a = instruction.arguments;
    switch (instruction.kind) {
        case Kind::EMBED: return by_row(rows, units, 1, [&](int row, int) { run_embed(*(const Embed*)a, row, scratch); });
        case Kind::PROJECT: return run_project(*(const Project*)a, rows, units, scratch);
        case Kind::ATTEND: return run_attend(*(const Attend*)a, rows, units, scratch);
        case Kind::ADD_NORM: {
            const auto& add = *(const AddNorm*)a;
            return by_row(rows, units, add.parts, [&](int row, int part) { run_add_norm(add, row, part, scratch); });
        }
        case Kind::CHOOSE: return by_row(rows, units, CHOICE_PARTS, [&](int row, int part) { choose_part(*(const Choose*)a, row, part); });
        case Kind::ADVANCE: return by_row(rows, units, 1, [&](int row, int) { run_advance(*(const Advance*)a, row); });
        case Kind::ROUTE: return run_route(*(const Route*)a, rows, scratch);
        case Kind::EXPERTS_UP: return run_experts_up(*(const ExpertsUp*)a, rows, units, scratch);
        case Kind::EXPERTS_DOWN: return run_experts_down(*(const ExpertsDown*)a, rows, units, scratch);
        case Kind::ELEMENTWISE: {
            const auto& elementwise = *(const Elementwise*)a;
            return by_row(rows, units, units_of(elementwise), [&](int row, int unit) { run_elements(elementwise, row, unit); });
        }
        case Kind::CONVOLVE: {
            const auto& delta = *(const Delta*)a;
            const int blocks = channel_blocks(delta_channels(delta));
            return by_sequence(rows, units, blocks, [&](int row, int block) { convolve_block(delta, row * blocks + block, 0); });
        }
        case Kind::DELTA_RULE: {
            const auto& delta = *(const Delta*)a;
            return by_sequence(rows, units, delta.heads, [&](int row, int head) { run_head(delta, row * delta.heads + head, 0, scratch.row); });
        }
        case Kind::REORDER: {
            const auto& reorder = *(const Reorder*)a;
            return by_row(rows, units, units_of(reorder), [&](int row, int unit) { run_reorder(reorder, row, unit); });
        }
        case Kind::GATED_CONVOLUTION: {
            const auto& gated = *(const GatedConvolution*)a;
            const int blocks = channel_blocks(gated.channels);
            return by_sequence(rows, units, blocks, [&](int row, int block) { run_gated_convolution(gated, row * blocks + block); });
        }
        case Kind::PROJECT_HEADS: return run_project_heads(*(const ProjectHeads*)a, rows, units, scratch);
    }
}

}  // namespace graphcore
