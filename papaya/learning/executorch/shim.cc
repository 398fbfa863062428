// The ExecuTorch runtime behind a C interface, for ctypes: load a training program, run it.
//
// Parameters live in the program's planned memory. `papaya_load` copies the caller's values there
// and returns where they are, so that the caller changes them in place between two runs. Frozen
// tensors are used where they are, without a copy.
//
// A malformed program can abort the process (ET_CHECK). Call this in a child process only.

#include <cstdio>
#include <cstring>
#include <exception>
#include <memory>
#include <vector>

#include <executorch/extension/data_loader/buffer_data_loader.h>
#include <executorch/extension/memory_allocator/malloc_memory_allocator.h>
#include <executorch/extension/threadpool/threadpool_guard.h>
#include <executorch/runtime/executor/program.h>
#include <executorch/runtime/kernel/operator_registry.h>
#include <executorch/runtime/platform/platform.h>
#include <executorch/runtime/platform/runtime.h>

using namespace executorch::runtime;
using executorch::aten::Tensor;
using executorch::aten::TensorImpl;
using executorch::extension::BufferDataLoader;
using executorch::extension::MallocMemoryAllocator;

extern "C" struct PapayaTensor {
  const char* name;
  const int32_t* sizes;
  uint64_t dimensions;
  int32_t type;  // a ScalarType
  const void* values;
  void* placed;  // set by papaya_load if the program trains it
};

namespace {

char last_error[512] = "";  // the first error that the runtime logged since papaya_load or papaya_run

void keep_error(et_timestamp_t, et_pal_log_level_t level, const char*, const char*, size_t,
                const char* message, size_t) {
  if ((level == kError || level == kFatal) && last_error[0] == '\0')
    snprintf(last_error, sizeof last_error, "%s", message);
}

const bool registered = register_pal(PalImpl::create(keep_error, __FILE__));

// Gives the runtime the caller's tensors instead of a file of weights.
struct NamedTensors final : NamedDataMap {
  NamedTensors(PapayaTensor* all, uint64_t count) : all(all), count(count) {}

  PapayaTensor* find(std::string_view key) const {
    for (uint64_t i = 0; i < count; i++)
      if (key == all[i].name) return &all[i];
    return nullptr;
  }
  Result<const TensorLayout> get_tensor_layout(std::string_view key) const override {
    static const uint8_t order[16] = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};
    const PapayaTensor* found = find(key);
    if (!found || found->dimensions > 16) return Error::NotFound;
    return TensorLayout::create({found->sizes, found->dimensions}, {order, found->dimensions},
                                static_cast<executorch::aten::ScalarType>(found->type));
  }
  Error load_data_into(std::string_view key, void* buffer, size_t size) const override {
    auto layout = get_tensor_layout(key);
    if (!layout.ok() || layout->nbytes() != size) return Error::InvalidExternalData;
    PapayaTensor* found = find(key);
    memcpy(buffer, found->values, size);
    found->placed = buffer;
    return Error::Ok;
  }
  Result<FreeableBuffer> get_data(std::string_view key) const override {
    auto layout = get_tensor_layout(key);
    if (!layout.ok()) return layout.error();
    return FreeableBuffer(find(key)->values, layout->nbytes(), nullptr);
  }
  Result<uint32_t> get_num_keys() const override { return static_cast<uint32_t>(count); }
  Result<const char*> get_key(uint32_t i) const override {
    if (i >= count) return Error::InvalidArgument;
    return static_cast<const char*>(all[i].name);
  }

  PapayaTensor* all;
  uint64_t count;
};

struct Training {
  Training(const void* program, uint64_t size, PapayaTensor* all, uint64_t count)
      : loader(program, size), tensors(all, count) {}

  Error load() {
    Result<Program> loaded = Program::load(&loader, Program::Verification::InternalConsistency);
    if (!loaded.ok()) return loaded.error();
    program = std::make_unique<Program>(std::move(*loaded));
    Result<MethodMeta> meta = program->method_meta("forward");
    if (!meta.ok()) return meta.error();
    for (size_t i = 0; i < meta->num_memory_planned_buffers(); i++) {
      Result<int64_t> size = meta->memory_planned_buffer_size(i);
      if (!size.ok()) return size.error();
      arenas.emplace_back(*size);
      spans.push_back({arenas.back().data(), arenas.back().size()});
    }
    planned = std::make_unique<HierarchicalAllocator>(
        Span<Span<uint8_t>>(spans.data(), spans.size()));
    manager = std::make_unique<MemoryManager>(&allocator, planned.get(), &temporary);
    Result<Method> found = program->load_method("forward", manager.get(), nullptr, &tensors);
    if (!found.ok()) return found.error();
    method = std::make_unique<Method>(std::move(*found));
    return Error::Ok;
  }

  Error run(const void* const* inputs, const uint64_t* bytes, uint64_t count) {
    MethodMeta meta = method->method_meta();
    if (count != meta.num_inputs()) return Error::InvalidArgument;
    for (uint64_t i = 0; i < count; i++) {
      Result<TensorInfo> info = meta.input_tensor_meta(i);
      if (!info.ok()) return info.error();
      if (info->nbytes() != bytes[i]) return Error::InvalidArgument;
      TensorImpl input(info->scalar_type(), info->sizes().size(),
                       const_cast<int32_t*>(info->sizes().data()), const_cast<void*>(inputs[i]),
                       const_cast<uint8_t*>(info->dim_order().data()));
      Error error = method->set_input(EValue(Tensor(&input)), i);
      if (error != Error::Ok) return error;
    }
    executorch::extension::threadpool::NoThreadPoolGuard one_thread;  // a job has one core
    return method->execute();
  }

  BufferDataLoader loader;
  NamedTensors tensors;
  MallocMemoryAllocator allocator, temporary;
  std::vector<std::vector<uint8_t>> arenas;
  std::vector<Span<uint8_t>> spans;
  std::unique_ptr<HierarchicalAllocator> planned;
  std::unique_ptr<MemoryManager> manager;
  std::unique_ptr<Program> program;
  std::unique_ptr<Method> method;
};

}  // namespace

extern "C" {

const char* papaya_last_error() { return last_error; }

bool papaya_has_operator(const char* name) { return registry_has_op_function(name); }

// The bytes of the program must stay where they are until papaya_free.
int papaya_load(const void* program, uint64_t size, PapayaTensor* tensors, uint64_t count,
                Training** training) {
  last_error[0] = '\0';
  runtime_init();
  try {
    auto loaded = std::make_unique<Training>(program, size, tensors, count);
    Error error = loaded->load();
    if (error == Error::Ok) *training = loaded.release();
    return static_cast<int>(error);
  } catch (const std::exception&) {  // the program asks for more memory than there is
    return static_cast<int>(Error::MemoryAllocationFailed);
  }
}

int papaya_run(Training* training, const void* const* inputs, const uint64_t* bytes,
               uint64_t count) {
  last_error[0] = '\0';
  return static_cast<int>(training->run(inputs, bytes, count));
}

// An output of the last run; null if it is no tensor of `bytes` bytes of float32.
const void* papaya_output(Training* training, uint64_t index, uint64_t bytes) {
  if (index >= training->method->outputs_size()) return nullptr;
  const EValue& value = training->method->get_output(index);
  if (!value.isTensor() || value.toTensor().nbytes() != bytes ||
      value.toTensor().scalar_type() != executorch::aten::ScalarType::Float)
    return nullptr;
  return value.toTensor().const_data_ptr();
}

void papaya_free(Training* training) { delete training; }
}
