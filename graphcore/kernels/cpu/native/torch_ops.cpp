// Operations that torch's dispatcher calls (graphcore/kernels/cpu/torch_ops.py), by torch's stable C interface. Python looks its
// functions up, so that the sources need no headers of torch, and the library does not link with it. Source of the interface:
// torch/csrc/stable/c/shim.h, torch/csrc/stable/stableivalue_conversions.h, torch/csrc/inductor/aoti_torch/c/shim.h.
#include <algorithm>
#include <cstring>

#include "chunk.h"
#include "matrix.h"
#include "product_output.h"

using namespace graphcore;

extern "C" {
void graphcore_products(int threads, const uint8_t* x, int tokens, int columns, int dtype, int rounding, const ProductOutput* outputs, int count);
void graphcore_attend_chunk(int threads, const Chunk* chunk);
}

namespace {

using Value = uint64_t;  // StableIValue: a number, a handle, or a pointer to an optional value's
using Handle = void*;    // of a tensor or a library

// Functions of torch, in the order of torch_ops.py. Those that return an int return 0 if they succeed; with valid handles they do,
// but for lack of memory, where torch itself would end the process.
struct Torch {
    int (*library_init_impl)(const char* space, const char* key, const char* file, uint32_t line, Handle* library);
    int (*library_impl)(Handle library, const char* name, void (*run)(Value*, uint64_t, uint64_t), uint64_t version);
    int (*get_dim)(Handle tensor, int64_t* dim);
    int (*get_sizes)(Handle tensor, int64_t** sizes);
    int (*get_dtype)(Handle tensor, int32_t* dtype);
    int (*data_ptr)(Handle tensor, void** data);
    int (*empty_strided)(int64_t dim, const int64_t* sizes, const int64_t* strides, int32_t dtype, int32_t device, int32_t index, Handle* tensor);
    int (*delete_tensor)(Handle tensor);
    int (*delete_optional)(Value* value);
    int (*num_threads)(uint32_t* threads);
};

Torch torch;
constexpr uint64_t VERSION = (2ull << 56) | (13ull << 48);  // of the interface
constexpr int MOST_DIMS = 8, CPU = 0;

// A tensor argument; the operation owns its handle.
class Argument {
  public:
    explicit Argument(Value value) : handle_(reinterpret_cast<Handle>(value)) {}
    static Argument optional(Value value) {
        auto* held = reinterpret_cast<Value*>(value);
        if (!held) return Argument(Value(0));
        Argument found(*held);
        torch.delete_optional(held);
        return found;
    }
    Argument(const Argument&) = delete;
    Argument(Argument&& other) : handle_(other.handle_) { other.handle_ = nullptr; }
    ~Argument() {
        if (handle_) torch.delete_tensor(handle_);
    }
    bool is_given() const { return handle_; }
    int64_t dim() const {
        int64_t found = 0;
        torch.get_dim(handle_, &found);
        return found;
    }
    const int64_t* sizes() const {
        int64_t* found = nullptr;
        torch.get_sizes(handle_, &found);
        return found;
    }
    int32_t dtype() const {
        int32_t found = 0;
        torch.get_dtype(handle_, &found);
        return found;
    }
    template <class T>
    T* data() const {
        void* found = nullptr;
        if (handle_) torch.data_ptr(handle_, &found);
        return static_cast<T*>(found);
    }

  private:
    Handle handle_;
};

// Source of the numbers: torch/headeronly/core/ScalarType.h.
int format_of(int32_t dtype) { return dtype == 6 ? F32 : dtype == 5 ? F16 : BF16; }

// Bytes below which one thread is as fast as several, which first have to meet: it reads them in 150 microseconds.
constexpr int64_t FEW_NBYTES = 2 << 20;

// Returns the number of threads for work that reads so many bytes of weights, or of keys and values.
int threads_for(int64_t nbytes) {
    uint32_t found = 1;
    if (nbytes >= FEW_NBYTES) torch.num_threads(&found);
    return int(found);
}

// Returns a new contiguous tensor like the argument, with another last size.
Handle new_like(const Argument& x, int64_t last) {
    int64_t sizes[MOST_DIMS], strides[MOST_DIMS], dim = x.dim(), stride = 1;
    std::memcpy(sizes, x.sizes(), dim * sizeof(int64_t));
    sizes[dim - 1] = last;
    for (int64_t i = dim - 1; i >= 0; i--) strides[i] = stride, stride *= sizes[i];
    Handle made = nullptr;
    torch.empty_strided(dim, sizes, strides, x.dtype(), CPU, -1, &made);
    return made;
}

double number(Value value) {
    double found;
    std::memcpy(&found, &value, sizeof(found));
    return found;
}

// native_linear(Tensor x, Tensor packed, Tensor? bias, int format, int rows, int columns, int rounding) -> Tensor
void native_linear(Value* stack, uint64_t, uint64_t) {
    const Argument x(stack[0]), packed(stack[1]), bias = Argument::optional(stack[2]);
    const int format = int(stack[3]), rows = int(stack[4]), columns = int(stack[5]), rounding = int(stack[6]);
    float scale = 1;
    if (has_tensor_scale(format)) std::memcpy(&scale, packed.data<uint8_t>() + packed.sizes()[0] - TAIL_NBYTES, sizeof(scale));
    const Handle made = new_like(x, rows);
    void* y = nullptr;
    torch.data_ptr(made, &y);
    int64_t tokens = 1;
    for (int64_t i = 0; i + 1 < x.dim(); i++) tokens *= x.sizes()[i];
    ProductOutput output{{packed.data<uint8_t>(), rows, columns, format, scale}, {}, bias.data<float>(), nullptr, static_cast<uint8_t*>(y), Activation(0), 0};
    graphcore_products(threads_for(packed.sizes()[0]), x.data<uint8_t>(), int(tokens), columns, format_of(x.dtype()), rounding, &output, 1);
    stack[0] = reinterpret_cast<Value>(made);
}

// native_attend(Tensor query, Tensor? key, Tensor? value, Tensor(a!) k_cache, Tensor(b!) v_cache, Tensor table, Tensor starts,
// Tensor counts, int k_format, int v_format, int window, float scale, Tensor? sinks, float cap) -> Tensor
void native_attend(Value* stack, uint64_t, uint64_t) {
    const Argument query(stack[0]), key = Argument::optional(stack[1]), value = Argument::optional(stack[2]), k_cache(stack[3]), v_cache(stack[4]),
        table(stack[5]), starts(stack[6]), counts(stack[7]), sinks = Argument::optional(stack[12]);
    const int64_t *shape = query.sizes(), *pool = k_cache.sizes();
    const Handle made = new_like(query, shape[3]);
    void* out = nullptr;
    torch.data_ptr(made, &out);
    const int64_t tokens = shape[1], nbytes = format_nbytes(format_of(query.dtype()));
    const int64_t row = tokens * shape[2] * shape[3] * nbytes, kv_row = tokens * pool[1] * shape[3] * nbytes, num_pages = table.sizes()[1];
    for (int64_t i = 0; i < shape[0]; i++) {
        const int64_t count = counts.data<int64_t>()[i];
        if (count < tokens) std::memset(static_cast<uint8_t*>(out) + i * row, 0, row);
        if (!count) continue;
        Chunk chunk{};
        chunk.query = query.data<uint8_t>() + i * row;
        chunk.key = key.is_given() ? key.data<uint8_t>() + i * kv_row : nullptr;
        chunk.value = value.is_given() ? value.data<uint8_t>() + i * kv_row : nullptr;
        chunk.out = static_cast<uint8_t*>(out) + i * row;
        chunk.k_cache = k_cache.data<uint8_t>();
        chunk.v_cache = v_cache.data<uint8_t>();
        chunk.pages = table.data<int32_t>() + i * num_pages;
        chunk.sinks = sinks.data<float>();
        chunk.start = starts.data<int64_t>()[i];
        chunk.tokens = int(count), chunk.heads = int(shape[2]), chunk.kv_heads = int(pool[1]), chunk.head_dim = int(shape[3]);
        chunk.page = int(pool[2]), chunk.num_pages = int(num_pages), chunk.window = int(stack[10]);
        chunk.format = format_of(query.dtype()), chunk.k_format = int(stack[8]), chunk.v_format = int(stack[9]);
        chunk.scale = float(number(stack[11])), chunk.cap = float(number(stack[13]));
        const int64_t keys = chunk.start + count, seen = chunk.window ? std::min(keys, count + chunk.window) : keys;
        graphcore_attend_chunk(threads_for(seen * chunk.kv_heads * chunk.head_dim * 2 * nbytes * count), &chunk);
    }
    stack[0] = reinterpret_cast<Value>(made);
}

}  // namespace

// Registers the operations. functions: those of `Torch`. Returns 0, or another number if torch refuses.
extern "C" int graphcore_implement_torch_ops(const void* const* functions) {
    std::memcpy(&torch, functions, sizeof(torch));
    Handle library = nullptr;
    if (torch.library_init_impl("graphcore", "CPU", "torch_ops.cpp", 0, &library)) return 1;
    return torch.library_impl(library, "native_linear", native_linear, VERSION) || torch.library_impl(library, "native_attend", native_attend, VERSION);
}
