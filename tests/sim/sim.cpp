// Simulated devices sim:0 … sim:3, a PrivateUse1 backend.
//
// A storage of a device owns a CPU storage. An operation is the CPU's own kernel, called with CPU tensors over the same
// memory ("mirrors"); what it returns is put back on the device. Views, writes and strides are therefore the CPU's, and
// so is every bit of every result. What is a device's own: tensors of two devices do not mix, and autograd has one
// thread for each device.
#include <ATen/ATen.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <ATen/native/Resize.h>
#include <ATen/ops/_has_compatible_shallow_copy_type_native.h>
#include <ATen/ops/dropout_native.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>

#include <unordered_map>
#include <unordered_set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DispatchKey;
using c10::DispatchKeySet;
using c10::Storage;
using c10::TensorImpl;

constexpr c10::DeviceIndex kDevices = 4;
constexpr auto kSim = c10::DeviceType::PrivateUse1;
thread_local c10::DeviceIndex current = 0;

c10::DeviceIndex checked(c10::DeviceIndex index) {
  TORCH_CHECK(index < kDevices, "there is no device sim:", int(index), ": there are ", int(kDevices));
  return index < 0 ? current : index;
}

Device with_index(Device device) { return {kSim, checked(device.index())}; }

// -- memory -------------------------------------------------------------------------------------------------------

void release(void* cpu) { delete static_cast<Storage*>(cpu); }

c10::DataPtr data_of(const Storage& cpu, Device device) {
  return {cpu.mutable_data(), new Storage(cpu), &release, device};
}

struct Memory final : c10::Allocator {
  c10::DataPtr allocate(size_t bytes) override {
    return data_of(Storage(Storage::use_byte_size_t(), bytes, c10::GetCPUAllocator(), true), {kSim, current});
  }
  void copy_data(void* to, const void* from, size_t bytes) const override { std::memcpy(to, from, bytes); }
};
Memory memory;

Storage cpu_of(const Storage& storage) {
  TORCH_CHECK(storage.data_ptr().get_deleter() == &release, "a storage that is not of a simulated device");
  return *static_cast<Storage*>(storage.data_ptr().get_context());
}

Storage on_device(const Storage& cpu, Device device) {
  return Storage(Storage::use_byte_size_t(), cpu.nbytes(), data_of(cpu, device), &memory, true);
}

// The CPU storage may have been resized.
void follow(const Storage& storage) {
  auto cpu = cpu_of(storage);
  if (cpu.nbytes() != storage.nbytes() || cpu.data() != storage.data()) {
    storage.unsafeGetStorageImpl()->set_data_ptr_noswap(data_of(cpu, storage.device()));
    storage.unsafeGetStorageImpl()->set_nbytes(cpu.nbytes());
  }
}

// -- tensors ------------------------------------------------------------------------------------------------------

// Sizes, strides and bits of `tensor` over another storage. A view has the keys of its base.
Tensor like(const Tensor& tensor, Storage storage, DispatchKey key, std::optional<DispatchKeySet> base = {}) {
  auto made = base ? at::detail::make_tensor<TensorImpl>(TensorImpl::VIEW, std::move(storage), *base, tensor.dtype())
                   : at::detail::make_tensor<TensorImpl>(std::move(storage), DispatchKeySet(key), tensor.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_sizes_and_strides(tensor.sizes(), tensor.strides(), tensor.storage_offset());
  if (tensor.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  if (tensor.is_complex()) made._set_conj(tensor.is_conj());
  made._set_neg(tensor.is_neg());
  return made;
}

// One call of an operation: the mirrors of its arguments, and the way back.
class Call {
 public:
  explicit Call(const c10::FunctionSchema& schema) : schema_(schema) {}

  // The mirror of an argument. A CPU tensor may be one number that is read, or `anywhere`: an index, as on CUDA.
  Tensor mirror(const Tensor& tensor, bool written = false, bool anywhere = false) {
    if (!tensor.defined()) return tensor;
    if (tensor.device().type() != kSim) {
      if (!anywhere && (written || tensor.dim() > 0)) saw(tensor.device());
      given_.insert(tensor.unsafeGetTensorImpl());
      return tensor;
    }
    saw(tensor.device());
    auto& known = mirrors_[tensor.unsafeGetTensorImpl()];
    if (!known.defined()) {
      known = like(tensor, mirror(tensor.storage(), tensor.key_set()), DispatchKey::CPU);
      if (!tensor.is_inference() && !known.is_inference())  // a write is one for both
        known.unsafeGetTensorImpl()->set_version_counter(tensor.unsafeGetTensorImpl()->version_counter());
      originals_.emplace(known.unsafeGetTensorImpl(), tensor);
    }
    return known;
  }

  Storage mirror(const Storage& storage, std::optional<DispatchKeySet> keys = {}) {
    auto cpu = cpu_of(storage);
    storages_.emplace(cpu.unsafeGetStorageImpl(), Known{storage, keys});
    return cpu;
  }

  void saw(Device device) {
    if (!device_) device_ = device;
    TORCH_CHECK(*device_ == device, "Expected all tensors to be on the same device, but found at least two devices, ",
                *device_, " and ", device, "! (", schema_.name(), ")");
  }

  // What an operation has written is the size, and the memory, of the originals too.
  void settle() {
    for (auto& [impl, tensor] : originals_) {
      if (impl->storage().unsafeGetStorageImpl() != cpu_of(tensor.storage()).unsafeGetStorageImpl())
        tensor.unsafeGetTensorImpl()->set_storage_keep_dtype(original(impl->storage()).storage);
      follow(tensor.storage());
      if (impl->sizes() != tensor.sizes() || impl->strides() != tensor.strides() ||
          impl->storage_offset() != tensor.storage_offset())
        tensor.unsafeGetTensorImpl()->set_sizes_and_strides(impl->sizes(), impl->strides(), impl->storage_offset());
    }
  }

  Tensor original(const Tensor& result) {
    if (!result.defined() || given_.count(result.unsafeGetTensorImpl())) return result;
    auto same = originals_.find(result.unsafeGetTensorImpl());
    if (same != originals_.end()) return same->second;
    TORCH_CHECK(result.layout() == at::kStrided, schema_.name(), " gives a tensor that is not strided");
    auto [storage, keys] = original(result.storage());
    return like(result, storage, DispatchKey::PrivateUse1, keys);
  }

 private:
  struct Known {
    Storage storage;
    std::optional<DispatchKeySet> keys;  // of a tensor that has it
  };

  Known original(const Storage& cpu) {
    auto known = storages_.find(cpu.unsafeGetStorageImpl());
    if (known == storages_.end()) {
      auto made = on_device(cpu, device_.value_or(Device(kSim, current)));
      known = storages_.emplace(cpu.unsafeGetStorageImpl(), Known{made, {}}).first;
    }
    return known->second;
  }

  const c10::FunctionSchema& schema_;
  std::optional<Device> device_;
  std::unordered_map<TensorImpl*, Tensor> mirrors_, originals_;
  std::unordered_set<TensorImpl*> given_;
  std::unordered_map<c10::StorageImpl*, Known> storages_;
};

// Any operation: its CPU kernel on the mirrors.
void as_on_cpu(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  Call call(schema);
  for (size_t i = 0, n = schema.arguments().size(); i < n; i++) {
    auto& value = *(stack->end() - n + i);
    const auto* alias = schema.arguments()[i].alias_info();
    bool written = alias && alias->isWrite();
    if (value.isTensor()) {
      value = call.mirror(value.toTensor(), written);
    } else if (value.isTensorList()) {
      c10::List<Tensor> mirrors;
      for (const Tensor& t : value.toTensorVector()) mirrors.push_back(call.mirror(t, written));
      value = mirrors;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> mirrors;
      for (const std::optional<Tensor>& t : value.toOptionalTensorVector())
        mirrors.push_back(t ? std::optional<Tensor>(call.mirror(*t, false, true)) : t);
      value = mirrors;
    } else if (value.isStorage()) {
      value = call.mirror(value.toStorage());
    } else if (value.isDevice() && value.toDevice().type() == kSim) {
      call.saw(with_index(value.toDevice()));
      value = Device(at::kCPU);
    }
  }
  op.redispatchBoxed(DispatchKeySet(DispatchKey::CPU), stack);
  call.settle();
  for (auto value = stack->end() - schema.returns().size(); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = call.original(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<Tensor> originals;
      for (const Tensor& t : value->toTensorVector()) originals.push_back(call.original(t));
      *value = originals;
    }
  }
}

Tensor mirror(const Tensor& tensor) {
  return tensor.device().type() == kSim ? like(tensor, cpu_of(tensor.storage()), DispatchKey::CPU) : tensor;
}

Tensor copy_from(const Tensor& from, const Tensor& to, bool) {
  mirror(to).copy_(mirror(from));
  return to;
}

Tensor copy_from_and_resize(const Tensor& from, const Tensor& to) {
  to.resize_(from.sizes());
  return copy_from(from, to, false);
}

// -- operations that ask for the type of the device before they choose a kernel: here as if it were a CPU ------------

Tensor dropout(const Tensor& input, double p, bool train) {
  if (!train || p <= 0 || p >= 1 || input.numel() == 0) return at::native::dropout(input, p, train);
  return input.mul(at::empty_like(input).bernoulli_(1 - p).div_(1 - p));
}

Tensor attention(const Tensor& query, const Tensor& key, const Tensor& value, const std::optional<Tensor>& mask,
                 double p, bool causal, std::optional<double> scale, bool grouped) {
  auto flash = int64_t(at::SDPBackend::flash_attention);
  bool mask_needs_gradient = mask && mask->requires_grad() && at::GradMode::is_enabled();
  if (mask_needs_gradient || at::_fused_sdp_choice(query, key, value, mask, p, causal, scale, grouped) != flash)
    return at::native::scaled_dot_product_attention(query, key, value, mask, p, causal, scale, grouped);
  auto added = mask;
  if (mask && mask->scalar_type() == at::kBool)
    added = at::zeros_like(*mask, query.options()).masked_fill_(mask->logical_not(), -std::numeric_limits<double>::infinity());
  return std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(query, key, value, p, causal, added, scale));
}

// Recurrent layers: on copies in the CPU's own memory, where autograd goes too.
void on_copies(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  std::optional<Device> device;
  auto copy = [&](const Tensor& t) {
    if (!t.defined() || !t.is_floating_point()) return t;  // sizes of batches are on the CPU
    if (!device) device = t.device();
    TORCH_CHECK(*device == t.device(), "Input and parameter tensors are not at the same device, found input tensor at ",
                *device, " and parameter tensor at ", t.device());
    return t.to(at::kCPU);
  };
  for (auto value = stack->end() - op.schema().arguments().size(); value != stack->end(); ++value) {
    if (value->isTensor()) {
      *value = copy(value->toTensor());
    } else if (value->isTensorList()) {
      c10::List<Tensor> copies;
      for (const Tensor& t : value->toTensorVector()) copies.push_back(copy(t));
      *value = copies;
    }
  }
  op.callBoxed(stack);
  for (auto value = stack->end() - op.schema().returns().size(); value != stack->end(); ++value)
    *value = value->toTensor().to(*device);
}

// `tensor.data = other` may change the device, as between a CPU and CUDA.
bool may_be_data(const Tensor& tensor, const Tensor& other) {
  auto plain = [](const Tensor& t) { return t.layout() == at::kStrided && (t.is_cpu() || t.device().type() == kSim); };
  return (plain(tensor) && plain(other)) || at::native::_has_compatible_shallow_copy_type(tensor, other);
}

void composite(torch::Library& library) {
  library.impl("dropout", &dropout);
  library.impl("scaled_dot_product_attention", &attention);
  library.impl("_has_compatible_shallow_copy_type", &may_be_data);
  for (const char* name : {"lstm.input", "lstm.data", "lstm_cell", "gru.input", "gru.data", "gru_cell", "rnn_tanh.input",
                           "rnn_tanh.data", "rnn_relu.input", "rnn_relu.data"})
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&on_copies>());
}

// -- devices ------------------------------------------------------------------------------------------------------

// Everything is done when it has been called, so one stream is enough and events have nothing to say.
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device getDevice() const override { return {kSim, current}; }
  void uncheckedSetDevice(Device device) const noexcept override { current = device.index(); }
  void setDevice(Device device) const override { current = checked(device.index()); }
  Device exchangeDevice(Device device) const override {
    Device before(kSim, current);
    setDevice(device);
    return before;
  }
  c10::DeviceIndex deviceCount() const noexcept override { return kDevices; }
  c10::Stream getStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream getDefaultStream(Device device) const override { return c10::Stream(c10::Stream::DEFAULT, device); }
  c10::Stream exchangeStream(c10::Stream stream) const override { return stream; }
  void record(void**, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override {}
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeEvent(void*) const override {}
  void synchronizeDevice(const c10::DeviceIndex) const override {}
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard);

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  c10::DeviceIndex deviceCount() const override { return kDevices; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  void setCurrentDevice(c10::DeviceIndex index) const override { current = checked(index); }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex index) const override {
    auto before = current;
    current = checked(index);
    return before;
  }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex index) const override { return exchangeDevice(index); }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex) const override { return at::detail::getDefaultCPUGenerator(); }
  at::Generator getNewGenerator(c10::DeviceIndex) const override { return at::detail::createCPUGenerator(); }
  void resizePrivateUse1Bytes(const Storage& storage, size_t bytes) const override {
    at::native::resize_bytes_cpu(cpu_of(storage).unsafeGetStorageImpl(), bytes);
    follow(storage);
  }
};
Hooks hooks;

}  // namespace

TORCH_LIBRARY_IMPL(_, PrivateUse1, library) {
  library.fallback(torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
}

TORCH_LIBRARY_IMPL(aten, PrivateUse1, library) {
  // Where the CPU has a kernel of its own, it is used, and not one made of other operations, which would round otherwise.
  for (const auto& name : c10::Dispatcher::singleton().getAllOpNames()) {
    auto op = c10::Dispatcher::singleton().findSchema(name);
    if (name.name.rfind("aten::", 0) == 0 && op && op->hasKernelForDispatchKey(DispatchKey::CPU))
      library.impl(toString(name).c_str(), torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
  }
  for (const char* name : {"convolution", "convolution_backward"})  // they choose by the type of the device
    library.impl(name, torch::CppFunction::makeFromBoxedFunction<&as_on_cpu>());
  library.impl("_copy_from", &copy_from);
  library.impl("_copy_from_and_resize", &copy_from_and_resize);
  composite(library);
}

TORCH_LIBRARY_IMPL(aten, AutogradPrivateUse1, library) { composite(library); }

// A copy sees to these bits itself, on the mirrors.
TORCH_LIBRARY_IMPL(aten, Conjugate, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }
TORCH_LIBRARY_IMPL(aten, Negative, library) { library.impl("_copy_from", torch::CppFunction::makeFallthrough()); }

extern "C" {
void sim_start() {
  c10::SetAllocator(kSim, &memory);
  at::RegisterPrivateUse1HooksInterface(&hooks);
}
int sim_count() { return kDevices; }
int sim_current() { return current; }
void sim_set(int index) { current = c10::DeviceIndex(index); }
}
