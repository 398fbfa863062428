// The runtime of compiled gradients: tensors, products of matrices, and the steps of clients.
//
// Inductor's code calls a C interface for tensors (torch/csrc/inductor/aoti_torch/c/shim.h). The
// functions of that interface which take tensors are defined here, on small structs and memory that
// is used again. For a model of a few thousand parameters, torch's own functions take longer than
// the arithmetic. Code that needs any other function of torch is linked with torch instead
// (compiled_gradient.py).
//
// Products of float32 matrices are computed in blocks of registers. The order of additions depends
// on the sizes of the matrices only, never on addresses, so results have the same bits wherever a
// tensor lies.
//
// Not thread-safe for one container; memory belongs to a thread. If there is no memory left, the
// functions that compiled code calls throw an exception, which that code catches. No exception
// leaves papaya_gradient and papaya_train.

#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace {

// -- tensors ------------------------------------------------------------------------------------

constexpr int kMostDimensions = 12;
constexpr int32_t kFloat = 6;  // c10::ScalarType
constexpr int64_t kLine = 64;  // bytes

int64_t item_bytes(int32_t dtype) {
  switch (dtype) {
    case 0: case 1: case 11: return 1;           // uint8, int8, bool
    case 2: case 5: case 15: return 2;           // int16, half, bfloat16
    case 3: case 6: return 4;                    // int32, float
    case 4: case 7: case 9: return 8;            // int64, double, complex64
    default: return 0;
  }
}

void* aligned(int64_t bytes) {
  void* block = std::aligned_alloc(kLine, bytes);
  if (block == nullptr) throw std::bad_alloc();
  return block;
}

// Memory in classes of sizes, four for each power of two. What is freed is used again.
struct Memory {
  static constexpr int kClasses = 256;
  std::vector<void*> free_blocks[kClasses];

  static int class_of(int64_t bytes, int64_t* rounded) {
    uint64_t lines = (bytes + kLine - 1) / kLine;
    if (lines < 4) {
      *rounded = (lines ? lines : 1) * kLine;
      return lines ? static_cast<int>(lines) - 1 : 0;
    }
    int power = 63 - __builtin_clzll(lines);
    uint64_t quarter = uint64_t{1} << (power - 2);
    uint64_t quarters = (lines + quarter - 1) / quarter;  // 4 to 8
    *rounded = static_cast<int64_t>(quarters * quarter) * kLine;
    return 4 * power + static_cast<int>(quarters) - 4;
  }

  void* take(int64_t bytes, int* its_class) {
    int64_t rounded;
    auto& blocks = free_blocks[*its_class = class_of(bytes, &rounded)];
    if (blocks.empty()) return aligned(rounded);
    void* block = blocks.back();
    blocks.pop_back();
    return block;
  }

  void give_back(void* block, int its_class) { free_blocks[its_class].push_back(block); }

  ~Memory() {
    for (auto& blocks : free_blocks)
      for (void* block : blocks) std::free(block);
  }
};

thread_local Memory memory;

struct Storage {
  void* block;
  int its_class;
  int64_t users;
};

struct Tensor {
  char* data;
  Storage* storage;  // null if the memory belongs to someone else
  int32_t dtype;
  int32_t dimensions;
  int64_t offset;
  int64_t sizes[kMostDimensions];
  int64_t strides[kMostDimensions];
};

template <typename T>
struct Spare {
  std::vector<T*> items;
  T* take() {
    if (items.empty()) return new T;
    T* item = items.back();
    items.pop_back();
    return item;
  }
  ~Spare() {
    for (T* item : items) delete item;
  }
};

thread_local Spare<Tensor> spare_tensors;
thread_local Spare<Storage> spare_storages;

Tensor* view(char* data, Storage* storage, int32_t dtype, int64_t dimensions, const int64_t* sizes,
             const int64_t* strides) {
  if (dimensions > kMostDimensions || item_bytes(dtype) == 0) return nullptr;
  Tensor* made = spare_tensors.take();
  made->data = data;
  made->storage = storage;
  made->dtype = dtype;
  made->dimensions = static_cast<int32_t>(dimensions);
  made->offset = 0;
  for (int64_t d = 0; d < dimensions; ++d) {
    made->sizes[d] = sizes[d];
    made->strides[d] = strides[d];
  }
  if (storage) ++storage->users;
  return made;
}

void drop(Tensor* tensor) {
  if (Storage* storage = tensor->storage; storage && --storage->users == 0) {
    memory.give_back(storage->block, storage->its_class);
    spare_storages.items.push_back(storage);
  }
  spare_tensors.items.push_back(tensor);
}

int64_t numel(const Tensor* tensor) {
  int64_t count = 1;
  for (int d = 0; d < tensor->dimensions; ++d) count *= tensor->sizes[d];
  return count;
}

// Elements from the first to the last that the strides reach.
int64_t span(int64_t dimensions, const int64_t* sizes, const int64_t* strides) {
  int64_t last = 0;
  for (int64_t d = 0; d < dimensions; ++d) {
    if (sizes[d] == 0) return 0;
    last += (sizes[d] - 1) * strides[d];
  }
  return last + 1;
}

// -- products -----------------------------------------------------------------------------------

#if defined(__AVX512F__)
constexpr int kLanes = 16, kMostVectors = 4;
#elif defined(__AVX__)
constexpr int kLanes = 8, kMostVectors = 2;
#elif defined(__ARM_NEON)
constexpr int kLanes = 4, kMostVectors = 4;
#else
constexpr int kLanes = 4, kMostVectors = 2;
#endif
constexpr int kPanel = kLanes * kMostVectors;  // columns that are computed together
constexpr int64_t kDepth = 512;                // of a block; its columns stay in a cache
constexpr int kAccumulators = 6 * kMostVectors;

typedef float Lanes __attribute__((vector_size(4 * kLanes)));

inline Lanes load(const float* from) {
  Lanes value;
  std::memcpy(&value, from, sizeof value);
  return value;
}

inline void store(float* to, Lanes value) { std::memcpy(to, &value, sizeof value); }

// The first lanes only; nothing is read or written behind them.
#if defined(__AVX512F__)
constexpr bool kLoadsSome = true;

inline Lanes load_some(const float* from, int lanes) {
  return (Lanes)_mm512_maskz_loadu_ps(static_cast<__mmask16>((1u << lanes) - 1), from);
}

inline void store_some(float* to, Lanes value, int lanes) {
  _mm512_mask_storeu_ps(to, static_cast<__mmask16>((1u << lanes) - 1), (__m512)value);
}
#else
constexpr bool kLoadsSome = false;

inline Lanes load_some(const float* from, int lanes) {
  float found[kLanes] = {};
  for (int lane = 0; lane < lanes; ++lane) found[lane] = from[lane];
  return load(found);
}

inline void store_some(float* to, Lanes value, int lanes) {
  float found[kLanes];
  store(found, value);
  for (int lane = 0; lane < lanes; ++lane) to[lane] = found[lane];
}
#endif

struct Matrix {
  const float* data;
  int64_t down, right;  // strides
};

// `Rows` rows and `Vectors` vectors of columns of c (+)= a b. b's rows are `b_stride` apart.
template <int Rows, int Vectors>
void block(int64_t depth, Matrix a, const float* b, int64_t b_stride, float* c, int64_t c_stride,
           int last_lanes, bool is_first) {
  Lanes sums[Rows][Vectors];
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r)
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v) {
      sums[r][v] = Lanes{};
      // The result is written at the end: by then its memory has come from farther caches.
      __builtin_prefetch(c + r * c_stride + v * kLanes, 1);
    }
  const float* from = a.data;
  for (int64_t k = 0; k < depth; ++k, from += a.right, b += b_stride) {
    Lanes columns[Vectors];
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v)
      columns[v] = kLoadsSome && v + 1 == Vectors ? load_some(b + v * kLanes, last_lanes)
                                                  : load(b + v * kLanes);
#pragma GCC unroll 16
    for (int r = 0; r < Rows; ++r) {
      const float factor = from[r * a.down];
#pragma GCC unroll 16
      for (int v = 0; v < Vectors; ++v) sums[r][v] += factor * columns[v];
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < Rows; ++r) {
    float* row = c + r * c_stride;
#pragma GCC unroll 16
    for (int v = 0; v < Vectors; ++v, row += kLanes) {
      if (v + 1 < Vectors || last_lanes == kLanes)
        store(row, is_first ? sums[r][v] : load(row) + sums[r][v]);
      else
        store_some(row, is_first ? sums[r][v] : load_some(row, last_lanes) + sums[r][v], last_lanes);
    }
  }
}

template <int Vectors>
void panel(int64_t rows, int64_t depth, Matrix a, const float* b, int64_t b_stride, float* c,
           int64_t c_stride, int last_lanes, bool is_first) {
  constexpr int kRows = kAccumulators / Vectors < 12 ? kAccumulators / Vectors : 12;
  const auto some = [&](auto kernel, int count) {
    for (; rows >= count; rows -= count, a.data += count * a.down, c += count * c_stride)
      kernel(depth, a, b, b_stride, c, c_stride, last_lanes, is_first);
  };
  some(block<kRows, Vectors>, kRows);
  some(block<4, Vectors>, 4);
  some(block<2, Vectors>, 2);
  some(block<1, Vectors>, 1);
}

typedef float Eight __attribute__((vector_size(32)));

// to[column][row] = from[row][column] for eight rows and columns.
inline void transpose_eight(const float* from, int64_t from_stride, float* to, int64_t to_stride) {
  Eight rows[8], pairs[8], fours[8];
  for (int r = 0; r < 8; ++r) std::memcpy(&rows[r], from + r * from_stride, sizeof(Eight));
  for (int r = 0; r < 8; r += 2) {
    pairs[r] = __builtin_shufflevector(rows[r], rows[r + 1], 0, 8, 1, 9, 4, 12, 5, 13);
    pairs[r + 1] = __builtin_shufflevector(rows[r], rows[r + 1], 2, 10, 3, 11, 6, 14, 7, 15);
  }
  for (int r = 0; r < 8; r += 4)
    for (int h = 0; h < 2; ++h) {
      const Eight one = pairs[r + h], two = pairs[r + 2 + h];
      fours[r + 2 * h] = __builtin_shufflevector(one, two, 0, 1, 8, 9, 4, 5, 12, 13);
      fours[r + 2 * h + 1] = __builtin_shufflevector(one, two, 2, 3, 10, 11, 6, 7, 14, 15);
    }
  for (int r = 0; r < 4; ++r) {
    const Eight low = __builtin_shufflevector(fours[r], fours[r + 4], 0, 1, 2, 3, 8, 9, 10, 11);
    const Eight high = __builtin_shufflevector(fours[r], fours[r + 4], 4, 5, 6, 7, 12, 13, 14, 15);
    std::memcpy(to + r * to_stride, &low, sizeof(Eight));
    std::memcpy(to + (r + 4) * to_stride, &high, sizeof(Eight));
  }
}

// Copies a matrix to rows that lie `to_stride` apart.
void copy_matrix(int64_t rows, int64_t columns, Matrix from, float* to, int64_t to_stride) {
  if (from.right == 1) {
    for (int64_t r = 0; r < rows; ++r)
      std::memcpy(to + r * to_stride, from.data + r * from.down, 4 * columns);
    return;
  }
  int64_t r = 0;
  if (from.down == 1)
    for (; r + 8 <= rows; r += 8) {
      int64_t c = 0;
      for (; c + 8 <= columns; c += 8)
        transpose_eight(from.data + c * from.right + r, from.right, to + r * to_stride + c, to_stride);
      for (; c < columns; ++c)
        for (int i = 0; i < 8; ++i)
          to[(r + i) * to_stride + c] = from.data[c * from.right + r + i];
    }
  for (; r < rows; ++r)
    for (int64_t c = 0; c < columns; ++c)
      to[r * to_stride + c] = from.data[r * from.down + c * from.right];
}

struct Scratch {
  float* data = nullptr;
  int64_t floats = 0;
  float* of(int64_t wanted) {
    if (wanted > floats) {
      std::free(data);
      data = nullptr;
      floats = 0;
      const int64_t rounded = (wanted + 1023) / 1024 * 1024;
      data = static_cast<float*>(aligned(4 * rounded));
      floats = rounded;
    }
    return data;
  }
  ~Scratch() { std::free(data); }
};

thread_local Scratch packed_columns, swapped_result;

// c = a b, where the rows of c are contiguous.
void product_by_rows(int64_t rows, int64_t columns, int64_t depth, Matrix a, Matrix b, float* c,
                     int64_t c_stride) {
  if (depth == 0)
    for (int64_t r = 0; r < rows; ++r) std::memset(c + r * c_stride, 0, 4 * columns);
  for (int64_t k = 0; k < depth; k += kDepth) {
    const int64_t deep = depth - k < kDepth ? depth - k : kDepth;
    for (int64_t first = 0; first < columns; first += kPanel) {
      const int64_t wide = columns - first < kPanel ? columns - first : kPanel;
      const int vectors = static_cast<int>((wide + kLanes - 1) / kLanes);
      const int last_lanes = static_cast<int>(wide - (vectors - 1) * kLanes);
      Matrix part{b.data + k * b.down + first * b.right, b.down, b.right};
      if (b.right != 1 || (last_lanes != kLanes && !kLoadsSome)) {
        float* packed = packed_columns.of(kDepth * kPanel);
        copy_matrix(deep, wide, part, packed, vectors * kLanes);
        part = {packed, vectors * kLanes, 1};
      }
      const Matrix left{a.data + k * a.right, a.down, a.right};
      const auto run = [&](auto kernel) {
        kernel(rows, deep, left, part.data, part.down, c + first, c_stride, last_lanes, k == 0);
      };
      switch (vectors) {
        case 1: run(panel<1>); break;
        case 2: run(panel<2>); break;
#if !defined(__AVX__) || defined(__AVX512F__)
        case 3: run(panel<3>); break;
        case 4: run(panel<4>); break;
#endif
      }
    }
  }
}

// An estimate of the time, in steps of one vector.
double effort(int64_t rows, int64_t columns, int64_t depth, bool must_transpose, bool must_turn) {
  const double copies = must_transpose ? 0.4 * columns * depth : 0.0;
  const double turns = must_turn ? 1.0 * rows * columns : 0.0;
  return copies + turns + 1.0 * rows * depth * ((columns + kLanes - 1) / kLanes);
}

// c = a b, for any strides. The transposed product is computed if that is less work.
void product(int64_t rows, int64_t columns, int64_t depth, Matrix a, Matrix b, float* c,
             int64_t c_down, int64_t c_right) {
  const bool by_rows = c_right == 1 || columns == 1, by_columns = c_down == 1 || rows == 1;
  const double straight = effort(rows, columns, depth, b.right != 1, !by_rows);
  const double swapped = effort(columns, rows, depth, a.down != 1, !by_columns);
  if (swapped < straight) {
    const Matrix left{b.data, b.right, b.down}, right{a.data, a.right, a.down};
    if (by_columns) return product_by_rows(columns, rows, depth, left, right, c, c_right);
    float* result = swapped_result.of(rows * columns);
    product_by_rows(columns, rows, depth, left, right, result, rows);
    if (by_rows) return copy_matrix(rows, columns, {result, 1, rows}, c, c_down);
    for (int64_t r = 0; r < rows; ++r)
      for (int64_t i = 0; i < columns; ++i) c[r * c_down + i * c_right] = result[i * rows + r];
    return;
  }
  if (by_rows) return product_by_rows(rows, columns, depth, a, b, c, c_down);
  float* result = swapped_result.of(rows * columns);
  product_by_rows(rows, columns, depth, a, b, result, columns);
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t i = 0; i < columns; ++i) c[r * c_down + i * c_right] = result[r * columns + i];
}

Matrix matrix(const Tensor* tensor, int first, int64_t number) {
  const auto* data = reinterpret_cast<const float*>(tensor->data);
  if (first) data += number * tensor->strides[0];
  return {data, tensor->strides[first], tensor->strides[first + 1]};
}

// Products of matrices, or of `first` = 1 lists of them.
int32_t products(Tensor* out, const Tensor* a, const Tensor* b, int first) {
  if (out->dtype != kFloat || a->dtype != kFloat || b->dtype != kFloat) return 1;
  const int64_t count = first ? out->sizes[0] : 1;
  for (int64_t number = 0; number < count; ++number) {
    const Matrix c = matrix(out, first, number);
    product(out->sizes[first], out->sizes[first + 1], a->sizes[first + 1],
            matrix(a, first, number), matrix(b, first, number), const_cast<float*>(c.data), c.down,
            c.right);
  }
  return 0;
}

}  // namespace

// -- torch's interface for tensors ----------------------------------------------------------------

extern "C" {

int32_t aoti_torch_delete_tensor_object(Tensor* tensor) {
  drop(tensor);
  return 0;
}

int32_t aoti_torch_get_data_ptr(Tensor* tensor, void** found) {
  *found = tensor->data;
  return 0;
}

int32_t aoti_torch_get_storage_size(Tensor* tensor, int64_t* found) {
  *found = (tensor->offset + span(tensor->dimensions, tensor->sizes, tensor->strides)) *
           item_bytes(tensor->dtype);
  return 0;
}

int32_t aoti_torch_get_dim(Tensor* tensor, int64_t* found) {
  *found = tensor->dimensions;
  return 0;
}

int32_t aoti_torch_get_numel(Tensor* tensor, int64_t* found) {
  *found = numel(tensor);
  return 0;
}

int32_t aoti_torch_get_sizes(Tensor* tensor, int64_t** found) {
  *found = tensor->sizes;
  return 0;
}

int32_t aoti_torch_get_strides(Tensor* tensor, int64_t** found) {
  *found = tensor->strides;
  return 0;
}

int32_t aoti_torch_get_dtype(Tensor* tensor, int32_t* found) {
  *found = tensor->dtype;
  return 0;
}

int32_t aoti_torch_get_device_type(Tensor*, int32_t* found) {
  *found = 0;  // CPU
  return 0;
}

int32_t aoti_torch_get_storage_offset(Tensor* tensor, int64_t* found) {
  *found = tensor->offset;
  return 0;
}

int32_t aoti_torch_new_tensor_handle(Tensor* tensor, Tensor** made) {
  *made = view(tensor->data, tensor->storage, tensor->dtype, tensor->dimensions, tensor->sizes,
               tensor->strides);
  (*made)->offset = tensor->offset;
  return 0;
}

int32_t aoti_torch__reinterpret_tensor(Tensor* tensor, int64_t dimensions, const int64_t* sizes,
                                       const int64_t* strides, int64_t further, Tensor** made) {
  char* data = tensor->data + further * item_bytes(tensor->dtype);
  *made = view(data, tensor->storage, tensor->dtype, dimensions, sizes, strides);
  if (*made == nullptr) return 1;
  (*made)->offset = tensor->offset + further;
  return 0;
}

int32_t aoti_torch_empty_strided(int64_t dimensions, const int64_t* sizes, const int64_t* strides,
                                 int32_t dtype, int32_t, int32_t, Tensor** made) {
  int its_class;
  void* block = memory.take(span(dimensions, sizes, strides) * item_bytes(dtype), &its_class);
  *made = view(static_cast<char*>(block), nullptr, dtype, dimensions, sizes, strides);
  if (*made == nullptr) {
    memory.give_back(block, its_class);
    return 1;
  }
  Storage* storage = spare_storages.take();
  *storage = {block, its_class, 1};
  (*made)->storage = storage;
  return 0;
}

int32_t aoti_torch_clone(Tensor* tensor, Tensor** made) {
  const int32_t failed = aoti_torch_empty_strided(tensor->dimensions, tensor->sizes,
                                                  tensor->strides, tensor->dtype, 0, 0, made);
  if (failed) return failed;
  const int64_t count = span(tensor->dimensions, tensor->sizes, tensor->strides);
  std::memcpy((*made)->data, tensor->data, count * item_bytes(tensor->dtype));
  return 0;
}

int32_t aoti_torch_create_tensor_from_blob(void* data, int64_t dimensions, const int64_t* sizes,
                                           const int64_t* strides, int64_t offset, int32_t dtype,
                                           int32_t, int32_t, Tensor** made) {
  char* first = static_cast<char*>(data) + offset * item_bytes(dtype);
  *made = view(first, nullptr, dtype, dimensions, sizes, strides);
  if (*made == nullptr) return 1;
  (*made)->offset = offset;
  return 0;
}

int32_t aoti_torch_create_tensor_from_blob_v2(void* data, int64_t dimensions, const int64_t* sizes,
                                              const int64_t* strides, int64_t offset,
                                              int32_t dtype, int32_t device, int32_t index,
                                              Tensor** made, int32_t, const uint8_t*, int64_t) {
  return aoti_torch_create_tensor_from_blob(data, dimensions, sizes, strides, offset, dtype, device,
                                            index, made);
}

int32_t aoti_torch_cpu_mm_out(Tensor* out, Tensor* a, Tensor* b) { return products(out, a, b, 0); }

int32_t aoti_torch_cpu_bmm_out(Tensor* out, Tensor* a, Tensor* b) { return products(out, a, b, 1); }

// -- gradients and steps ------------------------------------------------------------------------

typedef int32_t (*Run)(void* container, Tensor** inputs, size_t, Tensor** outputs, size_t,
                       void* stream, void* proxy);

// A tensor of the caller.
struct Blob {
  char* data;
  const int64_t* sizes;
  const int64_t* strides;
  int64_t dimensions;
  int64_t dtype;
};

// Whether a result has this many floats, one after the other.
static bool is_vector(const Tensor* found, int64_t length) {
  int64_t next = 1;
  for (int d = found->dimensions - 1; d >= 0; --d) {
    if (found->sizes[d] != 1 && found->strides[d] != next) return false;
    next *= found->sizes[d];
  }
  return found->dtype == kFloat && next == length;
}

// The loss, and its gradient as a tensor that the caller drops. Null on failure.
static Tensor* gradient_of(Run run, void* container, const Blob* inputs, int64_t count,
                           int64_t length, float* loss) {
  thread_local std::vector<Tensor*> given;
  given.resize(count);
  for (int64_t n = 0; n < count; ++n) {
    given[n] = view(inputs[n].data, nullptr, static_cast<int32_t>(inputs[n].dtype),
                    inputs[n].dimensions, inputs[n].sizes, inputs[n].strides);
    if (given[n] == nullptr) return nullptr;
  }
  Tensor* found[2];
  try {
    if (run(container, given.data(), count, found, 2, nullptr, nullptr)) return nullptr;
  } catch (...) {  // a wrong number of inputs; other exceptions are caught in the library
    return nullptr;
  }
  const bool fits = is_vector(found[0], 1) && is_vector(found[1], length);
  if (fits) std::memcpy(loss, found[0]->data, sizeof(float));
  drop(found[0]);
  if (fits) return found[1];
  drop(found[1]);
  return nullptr;
}

int32_t papaya_gradient(Run run, void* container, const Blob* inputs, int64_t count, int64_t length,
                        float* loss, float* gradient) try {
  Tensor* found = gradient_of(run, container, inputs, count, length, loss);
  if (found == nullptr) return 1;
  std::memcpy(gradient, found->data, 4 * length);
  drop(found);
  return 0;
} catch (...) {  // no memory
  return 1;
}

// Plain SGD of many clients. `inputs` are the parameters, which are set here, frozen tensors, and
// `columns` tensors with a row for each example; a batch takes the next `batches[…]` of `order`.
int32_t papaya_train(Run run, void* container, const Blob* inputs, int64_t count, int64_t columns,
                     int64_t length, int64_t clients, const float* const* models,
                     const int64_t* steps, const int64_t* batches, const int64_t* order,
                     const float* rates, float* updates, float* losses) try {
  std::vector<Blob> given(inputs, inputs + count);
  std::vector<std::vector<int64_t>> sizes(columns);
  std::vector<std::vector<char>> rows(columns);
  std::vector<int64_t> row_bytes(columns);
  for (int64_t n = 0; n < columns; ++n) {
    Blob& blob = given[count - columns + n];
    sizes[n].assign(blob.sizes, blob.sizes + blob.dimensions);
    row_bytes[n] = item_bytes(static_cast<int32_t>(blob.dtype));
    for (int64_t d = 1; d < blob.dimensions; ++d) row_bytes[n] *= sizes[n][d];
    blob.sizes = sizes[n].data();
  }
  auto* values = reinterpret_cast<float*>(given[0].data);
  for (int64_t client = 0; client < clients; ++client) {
    const float* model = models[client];
    float* update = updates + client * length;
    std::memcpy(values, model, 4 * length);
    for (int64_t step = 0; step < steps[client]; ++step, ++batches, ++rates, ++losses) {
      for (int64_t n = 0; n < columns; ++n) {
        const char* from = inputs[count - columns + n].data;
        const size_t wanted = *batches * row_bytes[n] + kLine;
        if (rows[n].size() < wanted) rows[n].resize(2 * wanted);
        char* to = rows[n].data() + (-reinterpret_cast<uintptr_t>(rows[n].data()) & (kLine - 1));
        given[count - columns + n].data = to;
        sizes[n][0] = *batches;
        for (int64_t row = 0; row < *batches; ++row)
          std::memcpy(to + row * row_bytes[n], from + order[row] * row_bytes[n], row_bytes[n]);
      }
      order += *batches;
      Tensor* found = gradient_of(run, container, given.data(), count, length, losses);
      if (found == nullptr) return 1;
      const auto* gradient = reinterpret_cast<const float*>(found->data);
      for (int64_t n = 0; n < length; ++n) values[n] -= *rates * gradient[n];
      drop(found);
    }
    for (int64_t n = 0; n < length; ++n) update[n] = values[n] - model[n];
  }
  return 0;
} catch (...) {  // no memory
  return 1;
}

}  // extern "C"
