// "simgpu": a device for torch (PrivateUse1) without hardware. It shows what a CPU hides.
//
// * Memory: a device address lies in pages without access, so that a CPU access (.numpy(), data_ptr) is a
//   segmentation fault. Kernels reach the same bytes through a second mapping (the "back").
// * Operators run torch's CPU kernels on the back. CPU and device tensors can't be mixed, as on CUDA.
// * Copies that CUDA may carry out later, and kernels that work in place, are carried out as late as CUDA might: when a
//   stream, an event, the device or a blocking operator waits for them. A host buffer that is used again too early gives
//   wrong values every time. After schedule(seed) each stream has run by chance more than it must at any time.
// * A kernel counts as unfinished for every stream that was not made to wait for it. A copy or an operator there that
//   reads its result gets poison every time. Collectives of simccl are not checked, they only write.
// * Copies by kind, synchronizations of the host, pinned memory and memory of each device are counted. Pinned memory is
//   taken in powers of two and kept when it is freed, as torch's host allocator does.
// * A clock of simulated seconds, for copies to a device that have a rate and for a host that says what it spent.
// * One generator per device, from which operators without a generator draw.
// * Collectives: the c10d backend "simccl" is for this device alone and refuses CPU tensors, as NCCL does.
//
// SIMGPU_DEVICES says how many devices this process sees.
#include <torch/csrc/utils/pybind.h>

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/InferSize.h>
#include <ATen/TensorUtils.h>
#include <ATen/core/CachingHostAllocator.h>
#include <ATen/detail/PrivateUse1HooksInterface.h>
#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/library.h>

#include <sys/mman.h>
#include <bit>
#include <cstdlib>
#include <deque>
#include <map>
#include <mutex>
#include <random>
#include <set>

namespace {

using at::Tensor;
using c10::Device;
using c10::DeviceIndex;
using c10::Stream;
using c10::StreamId;
constexpr StreamId kStreams = 32;
constexpr auto kSim = c10::DeviceType::PrivateUse1;

DeviceIndex visible_devices() {
  const char* text = std::getenv("SIMGPU_DEVICES");
  return static_cast<DeviceIndex>(text ? std::atoi(text) : 2);
}
const DeviceIndex kDevices = visible_devices();

std::recursive_mutex mutex_;
using Lock = std::lock_guard<std::recursive_mutex>;
thread_local DeviceIndex current_device_ = 0;

// ``simgpu`` without an index means the thread's current device.
Device with_index(Device d) { return d.index() < 0 ? Device(kSim, current_device_) : d; }

// --- counters: of the whole process, and of each thread ---------------------------------------------------------------

using Counts = std::map<std::string, int64_t>;
Counts all_counts_;
thread_local Counts own_counts_;

void count(const std::string& what, int64_t n = 1) {
  Lock lock(mutex_);
  all_counts_[what] += n;
  own_counts_[what] += n;
}

// --- streams: queues of work, carried out when something waits for it ------------------------------------------------

using Key = std::pair<DeviceIndex, StreamId>;
using Clock = std::map<Key, uint64_t>;  // tickets by stream

struct Queue {
  std::deque<std::function<void()>> work;
  uint64_t issued = 0, done = 0;
  Clock knows;  // the last work of each stream after which the next work here runs
  double ends_s = 0;  // in simulated time
};
std::map<Key, Queue> queues_;
Clock host_knows_;  // the last work of each stream that the host has waited for

// Simulated time: the host's own is what spend() was told, and its waits; a stream's is that of copies to its device.
double host_s_ = 0;
double copies_per_s_ = 0;  // bytes; 0: copies take no time

void merge(Clock& into, const Clock& from) {
  for (auto& [key, ticket] : from) into[key] = std::max(into[key], ticket);
}
std::map<DeviceIndex, StreamId> last_stream_;
thread_local std::map<DeviceIndex, StreamId> current_stream_;

StreamId current_stream(DeviceIndex device) { return current_stream_[device]; }  // 0, the default one, if none was set

void drain(DeviceIndex device, StreamId id, uint64_t until = UINT64_MAX) {
  Lock lock(mutex_);
  Queue& queue = queues_[{device, id}];
  while (!queue.work.empty() && queue.done < until) {
    auto work = std::move(queue.work.front());
    queue.work.pop_front();
    queue.done++;
    work();
  }
}
void drain_current(DeviceIndex device) { drain(device, current_stream(device)); }

// --- schedules: how much each stream has run by now, beyond what something waited for ----------------------------------

struct Schedule {
  std::mt19937_64 random;
  unsigned percent;  // of the moments at which a stream goes on
};
std::optional<Schedule> schedule_;

// A moment at which streams may go on.
void advance() {
  Lock lock(mutex_);
  if (!schedule_) return;
  auto draw = [&](size_t below) { return schedule_->random() % below; };
  for (auto& [key, queue] : queues_)
    if (!queue.work.empty() && draw(100) < schedule_->percent)
      drain(key.first, key.second, queue.done + 1 + draw(queue.work.size()));
}
void set_schedule(std::optional<uint64_t> seed) {
  Lock lock(mutex_);
  schedule_.reset();
  if (!seed) return;
  schedule_ = Schedule{std::mt19937_64(*seed), 0};
  schedule_->percent = schedule_->random() % 5 * 25;  // from as late as can be to at once
}

void drain_all() {
  Lock lock(mutex_);
  for (auto& [key, queue] : queues_) drain(key.first, key.second);
}
// The host waits for a stream, for all it has been given.
void host_waits(DeviceIndex device, StreamId id, const char* why) {
  Lock lock(mutex_);
  count("waits");
  count(why);
  drain(device, id);
  merge(host_knows_, queues_[{device, id}].knows);
  host_s_ = std::max(host_s_, queues_[{device, id}].ends_s);
}
void host_waits_for_all() {
  Lock lock(mutex_);
  count("waits");
  count("waits for a device");
  drain_all();
  for (auto& [key, queue] : queues_) {
    host_s_ = std::max(host_s_, queue.ends_s);
    uint64_t last = queue.knows[key];
    host_knows_[key] = last;
    queue.knows = {{key, last}};  // what the host knows counts for every stream
  }
}
void enqueue(DeviceIndex device, StreamId id, std::function<void()> work) {
  Lock lock(mutex_);
  Queue& queue = queues_[{device, id}];
  queue.work.push_back(std::move(work));
  queue.issued++;
  advance();
}
void enqueue(DeviceIndex device, std::function<void()> work) {
  enqueue(device, current_stream(device), std::move(work));
}

// --- memory ---------------------------------------------------------------------------------------------------------

constexpr size_t kPerDevice = size_t(1) << 35;  // of address space
struct Arena {
  size_t size = kPerDevice * kDevices;
  char* front = reserve(PROT_NONE);  // device addresses
  char* back = reserve(PROT_READ | PROT_WRITE);
  char* reserve(int protection) const {
    void* p = mmap(nullptr, size, protection, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    TORCH_CHECK(p != MAP_FAILED, "simgpu: no address space");
    return static_cast<char*>(p);
  }
};
Arena& arena() {
  static Arena* one = new Arena();
  return *one;
}
size_t offset_of(const void* p) {
  auto c = static_cast<const char*>(p);
  TORCH_CHECK(c >= arena().front && c < arena().front + arena().size, "simgpu: not a device address");
  return c - arena().front;
}
void* back_of(const void* p) { return p == nullptr ? nullptr : arena().back + offset_of(p); }

struct Block {
  size_t size;
  DeviceIndex device;
  StreamId stream;
  std::set<StreamId> others;  // that record_stream named
  Clock written;
};
std::map<void*, Block> live_;
std::map<std::tuple<DeviceIndex, StreamId, size_t>, std::vector<void*>> free_;
std::map<DeviceIndex, size_t> top_;
struct Used {
  int64_t now = 0, peak = 0;
};
std::map<DeviceIndex, Used> used_;  // bytes of tensors

void release(void* p) {
  if (p == nullptr) return;
  Lock lock(mutex_);
  Block block = live_.at(p);
  live_.erase(p);
  used_[block.device].now -= block.size;
  for (StreamId other : block.others) drain(block.device, other);
  free_[{block.device, block.stream, block.size}].push_back(p);  // for the same stream only, as on CUDA
}

struct DeviceAllocator final : c10::DeviceAllocator {
  at::DataPtr allocate(size_t asked) override {
    Lock lock(mutex_);
    DeviceIndex device = current_device_;
    if (asked == 0) return {nullptr, nullptr, &release, Device(kSim, device)};
    size_t size = (asked + 511) / 512 * 512;
    StreamId stream = current_stream(device);
    auto& spare = free_[{device, stream, size}];
    void* p;
    if (!spare.empty()) {
      p = spare.back();
      spare.pop_back();
    } else {
      size_t& top = top_[device];
      TORCH_CHECK_WITH(OutOfMemoryError, top + size <= kPerDevice, "simgpu: out of memory");
      p = arena().front + device * kPerDevice + top;
      top += size;
      std::memset(back_of(p), 0xCB, size);  // never zeros by chance
    }
    live_[p] = Block{size, device, stream, {}};
    Used& used = used_[device];
    used.now += size;
    used.peak = std::max(used.peak, used.now);
    return {p, p, &release, Device(kSim, device)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &release; }
  void copy_data(void* to, const void* from, size_t n) const override {
    drain_all();
    std::memcpy(back_of(to), back_of(from), n);
  }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {}
  void recordStream(const c10::DataPtr& ptr, c10::Stream stream) override {
    Lock lock(mutex_);
    auto found = live_.find(ptr.get());
    if (found != live_.end() && stream.id() != found->second.stream) found->second.others.insert(stream.id());
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(DeviceIndex device) override {
    Lock lock(mutex_);
    c10::CachingDeviceAllocator::DeviceStats stats;
    auto all = static_cast<size_t>(c10::CachingAllocator::StatType::AGGREGATE);
    stats.allocated_bytes[all].current = used_[device].now;
    stats.allocated_bytes[all].peak = used_[device].peak;
    stats.reserved_bytes[all].current = stats.reserved_bytes[all].peak = top_[device];
    return stats;
  }
  void resetAccumulatedStats(DeviceIndex) override {}
  void resetPeakStats(DeviceIndex) override {}
};
DeviceAllocator device_allocator_;

// Whether the next work of a device's current stream runs after all that was written to a tensor's memory.
bool is_ready(const Tensor& t, DeviceIndex device) {
  Lock lock(mutex_);
  auto found = live_.find(t.storage().mutable_data());
  if (found == live_.end()) return true;
  Key reader{device, current_stream(device)};
  Clock known = queues_[reader].knows;
  merge(known, host_knows_);
  for (auto& [writer, ticket] : found->second.written)
    if (writer != reader && known[writer] < ticket) return false;
  return true;
}
void mark_written(const Tensor& t, DeviceIndex device) {
  Lock lock(mutex_);
  auto found = live_.find(t.storage().mutable_data());
  if (found == live_.end()) return;
  Key writer{device, current_stream(device)};
  found->second.written[writer] = ++queues_[writer].knows[writer];
}
// As many elements of wrong values.
Tensor poison_like(const Tensor& host) {
  auto made = at::empty(host.sizes(), host.options());
  if (made.numel()) std::memset(made.mutable_data_ptr(), 0xCB, made.nbytes());
  return made;
}

struct Pinned {
  size_t size;
  Clock used_by;  // the last copy of each stream from or to it
};
std::map<void*, Pinned> pinned_;                       // in use
std::vector<std::pair<void*, Pinned>> leaving_;        // freed, while copies may still use them
std::map<size_t, std::vector<void*>> unused_;          // freed, and kept
void unpin(void* p) {
  if (p == nullptr) return;
  Lock lock(mutex_);
  leaving_.emplace_back(p, pinned_.at(p));
  pinned_.erase(p);
}
// Keep the freed blocks whose copies have ended.
void settle() {
  auto is_used = [](auto& leaving) {
    for (auto& [key, ticket] : leaving.second.used_by)
      if (queues_[key].done < ticket) return true;
    unused_[leaving.second.size].push_back(leaving.first);
    return false;
  };
  leaving_.erase(std::stable_partition(leaving_.begin(), leaving_.end(), is_used), leaving_.end());
}
int64_t pinned_bytes() {
  Lock lock(mutex_);
  size_t total = 0;
  for (auto& [p, block] : pinned_) total += block.size;
  for (auto& [p, block] : leaving_) total += block.size;
  for (auto& [size, blocks] : unused_) total += size * blocks.size();
  return total;
}
// The pinned block that an address lies in, or null.
Pinned* pinned_block(const void* p) {
  auto after = pinned_.upper_bound(const_cast<void*>(p));
  if (after == pinned_.begin()) return nullptr;
  auto& [begin, block] = *std::prev(after);
  return static_cast<const char*>(p) < static_cast<char*>(begin) + block.size ? &block : nullptr;
}
bool is_pinned(const void* p) {
  Lock lock(mutex_);
  return pinned_block(p) != nullptr;
}
// The last work of a device's current stream uses pinned memory.
void mark_used(const void* p, DeviceIndex device) {
  Lock lock(mutex_);
  Key key{device, current_stream(device)};
  if (auto* block = pinned_block(p)) block->used_by[key] = queues_[key].issued;
}
struct HostAllocator final : at::HostAllocator {
  at::DataPtr allocate(size_t n) override {
    if (n == 0) return {nullptr, nullptr, &unpin, c10::DeviceType::CPU};
    Lock lock(mutex_);
    n = std::bit_ceil(n);
    settle();
    void* p = nullptr;
    auto& unused = unused_[n];
    if (!unused.empty()) {
      p = unused.back();
      unused.pop_back();
    } else {
      TORCH_CHECK(posix_memalign(&p, 4096, n) == 0, "simgpu: no host memory");
    }
    std::memset(p, 0xCB, n);  // never zeros, nor what was there before
    pinned_[p] = Pinned{n, {}};
    return {p, p, &unpin, c10::DeviceType::CPU};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &unpin; }
  void copy_data(void* to, const void* from, size_t n) const override { std::memcpy(to, from, n); }
  bool record_event(void*, void*, c10::Stream) override { return true; }
  void empty_cache() override {
    Lock lock(mutex_);
    settle();
    for (auto& [size, blocks] : unused_)
      for (void* p : blocks) std::free(p);
    unused_.clear();
  }
  at::HostStats get_stats() override { return {}; }
  void reset_accumulated_stats() override {}
  void reset_peak_stats() override {}
};
HostAllocator host_allocator_;
// --- generators -----------------------------------------------------------------------------------------------------

struct Generator final : c10::GeneratorImpl {
  explicit Generator(DeviceIndex index, uint64_t seed = c10::default_rng_seed_val)
      : GeneratorImpl(Device(kSim, index), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1)),
        host(at::detail::createCPUGenerator(seed)) {}
  void set_current_seed(uint64_t seed) override { host.set_current_seed(seed); }
  void set_offset(uint64_t offset) override { host.set_offset(offset); }
  uint64_t get_offset() const override { return 0; }
  uint64_t current_seed() const override { return host.current_seed(); }
  uint64_t seed() override { return host.seed(); }
  void set_state(const c10::TensorImpl& state) override { host.unsafeGetGeneratorImpl()->set_state(state); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return host.unsafeGetGeneratorImpl()->get_state(); }
  Generator* clone_impl() const override {
    auto* other = new Generator(device().index());
    other->set_state(*get_state());
    return other;
  }
  at::Generator host;
};
const at::Generator& default_generator(DeviceIndex index) {
  static auto* all = [] {
    auto* made = new std::vector<at::Generator>();
    for (DeviceIndex i = 0; i < kDevices; i++) made->push_back(at::make_generator<Generator>(i));
    return made;
  }();
  return all->at(index < 0 ? current_device_ : index);
}

// --- what torch asks a device for -------------------------------------------------------------------------------------

struct Event {
  DeviceIndex device;
  StreamId stream;
  uint64_t until;
  Clock knows;
  double ends_s;
  bool asked = false;
};
struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return kSim; }
  Device exchangeDevice(Device d) const override {
    Device old(kSim, current_device_);
    setDevice(d);
    return old;
  }
  Device getDevice() const override { return {kSim, current_device_}; }
  void setDevice(Device d) const override {
    TORCH_CHECK(d.index() < kDevices, "simgpu: invalid device ordinal ", int(d.index()), " of ", int(kDevices));
    uncheckedSetDevice(d);
  }
  void uncheckedSetDevice(Device d) const noexcept override {
    if (d.index() >= 0) current_device_ = d.index();
  }
  Stream getStream(Device d) const override {
    d = with_index(d);
    return Stream(Stream::UNSAFE, d, current_stream(d.index()));
  }
  Stream getDefaultStream(Device d) const override { return Stream(Stream::UNSAFE, with_index(d), 0); }
  Stream getStreamFromGlobalPool(Device d, bool = false) const override { return getNewStream(d); }
  Stream getNewStream(Device d, int = 0) const override {
    Lock lock(mutex_);
    d = with_index(d);
    return Stream(Stream::UNSAFE, d, 1 + last_stream_[d.index()]++ % kStreams);  // from a pool, as CUDA's
  }
  Stream exchangeStream(Stream s) const override {
    Stream old = getStream(s.device());
    current_stream_[s.device_index()] = s.id();
    return old;
  }
  void* getStreamNativeHandle(const Stream s) const override { return reinterpret_cast<void*>(s.id()); }
  DeviceIndex deviceCount() const noexcept override { return kDevices; }
  void record(void** event, const Stream& s, const DeviceIndex, const c10::EventFlag) const override {
    Lock lock(mutex_);
    if (*event == nullptr) *event = new Event();
    Queue& queue = queues_[{s.device_index(), s.id()}];
    auto* e = static_cast<Event*>(*event);
    *e = {s.device_index(), s.id(), queue.issued, queue.knows, queue.ends_s};
    merge(e->knows, host_knows_);
  }
  void block(void* event, const Stream& s) const override {
    Lock lock(mutex_);
    auto* e = static_cast<Event*>(event);
    if (e == nullptr) return;
    Event before = *e;
    Queue& waiting = queues_[{s.device_index(), s.id()}];
    merge(waiting.knows, before.knows);
    waiting.ends_s = std::max(waiting.ends_s, before.ends_s);
    enqueue(s.device_index(), s.id(), [=] { drain(before.device, before.stream, before.until); });
  }
  bool queryEvent(void* event) const override {
    auto* e = static_cast<Event*>(event);
    if (e == nullptr) return true;
    Lock lock(mutex_);
    if (queues_[{e->device, e->stream}].done >= e->until) {
      merge(host_knows_, e->knows);
      return true;
    }
    if (std::exchange(e->asked, true)) drain(e->device, e->stream, e->until);  // late, but not for ever
    return false;
  }
  void destroyEvent(void* event, const DeviceIndex) const noexcept override { delete static_cast<Event*>(event); }
  bool queryStream(const Stream& s) const override {
    Lock lock(mutex_);
    Queue& queue = queues_[{s.device_index(), s.id()}];
    if (!queue.work.empty()) return false;
    merge(host_knows_, queue.knows);
    return true;
  }
  void synchronizeStream(const Stream& s) const override {
    host_waits(s.device_index(), s.id(), "waits for a stream");
  }
  void synchronizeEvent(void* event) const override {
    Lock lock(mutex_);
    count("waits");
    count("waits for an event");
    auto* e = static_cast<Event*>(event);
    if (e == nullptr) return;
    drain(e->device, e->stream, e->until);
    merge(host_knows_, e->knows);
    host_s_ = std::max(host_s_, e->ends_s);
    advance();
  }
  void synchronizeDevice(const DeviceIndex) const override { host_waits_for_all(); }
  void recordDataPtrOnStream(const c10::DataPtr& ptr, const Stream& s) const override {
    device_allocator_.recordStream(ptr, s);
  }
};
C10_REGISTER_GUARD_IMPL(PrivateUse1, Guard)

struct Hooks final : at::PrivateUse1HooksInterface {
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return kDevices > 0; }
  bool hasPrimaryContext(DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(DeviceIndex i) const override { return default_generator(i); }
  at::Generator getNewGenerator(DeviceIndex i) const override {
    return at::make_generator<Generator>(i < 0 ? current_device_ : i);
  }
  Device getDeviceFromPtr(void* p) const override { return {kSim, DeviceIndex(offset_of(p) / kPerDevice)}; }
  bool isPinnedPtr(const void* p) const override { return is_pinned(p); }
  at::Allocator* getPinnedMemoryAllocator() const override { return &host_allocator_; }
  DeviceIndex deviceCount() const override { return kDevices; }
  void setCurrentDevice(DeviceIndex i) const override { Guard().setDevice(Device(kSim, i)); }
  DeviceIndex getCurrentDevice() const override { return current_device_; }
  DeviceIndex exchangeDevice(DeviceIndex i) const override { return Guard().exchangeDevice(Device(kSim, i)).index(); }
  DeviceIndex maybeExchangeDevice(DeviceIndex i) const override { return exchangeDevice(i); }
  void resizePrivateUse1Bytes(const c10::Storage& storage, size_t n) const override {
    c10::OptionalDeviceGuard guard(storage.device());
    auto fresh = device_allocator_.allocate(n);
    if (size_t kept = std::min(n, storage.nbytes())) {
      drain_current(storage.device().index());
      std::memcpy(back_of(fresh.get()), back_of(storage.data()), kept);
      Lock lock(mutex_);
      live_.at(fresh.get()).written = live_.at(storage.mutable_data()).written;
    }
    auto* impl = storage.unsafeGetStorageImpl();
    impl->set_data_ptr_noswap(std::move(fresh));
    impl->set_nbytes(n);
  }
};
Hooks* hooks() {
  static Hooks one;
  return &one;
}

// --- tensors --------------------------------------------------------------------------------------------------------

bool is_sim(const Tensor& t) { return t.defined() && t.device().type() == kSim; }

// The same memory as a CPU tensor. ``owning``: it keeps the memory.
Tensor back(const Tensor& t, bool owning = false) {
  const auto& storage = t.storage();
  auto* held = owning ? new c10::Storage(storage) : nullptr;
  c10::DataPtr data(back_of(storage.data()), held, [](void* p) { delete static_cast<c10::Storage*>(p); },
                    c10::DeviceType::CPU);
  c10::Storage twin(c10::Storage::use_byte_size_t(), storage.nbytes(), std::move(data), nullptr, false);
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      std::move(twin), c10::DispatchKeySet(c10::DispatchKey::CPU), t.dtype());
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(t.storage_offset());
  impl->set_sizes_and_strides(t.sizes(), t.strides());
  if (t.unsafeGetTensorImpl()->is_wrapped_number()) impl->set_wrapped_number(true);
  return made;
}

Tensor view_of(const Tensor& base, c10::ScalarType dtype, at::IntArrayRef sizes, at::IntArrayRef strides, int64_t at) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(
      c10::TensorImpl::VIEW, c10::Storage(base.storage()), base.key_set(), c10::scalarTypeToTypeMeta(dtype));
  auto* impl = made.unsafeGetTensorImpl();
  impl->set_storage_offset(at);
  impl->set_sizes_and_strides(sizes, strides);
  return made;
}

Tensor empty_at(at::IntArrayRef size, at::IntArrayRef stride, c10::ScalarType dtype, Device device) {
  c10::OptionalDeviceGuard guard(device);
  return at::detail::empty_strided_generic(
      size, stride, &device_allocator_, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), dtype);
}

Tensor to_sim(const Tensor& host, Device device) {
  auto made = empty_at(host.sizes(), host.strides(), host.scalar_type(), device);
  if (host.numel()) back(made).copy_(host);
  return made;
}

Tensor empty(at::IntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
             std::optional<Device> device, std::optional<bool>, std::optional<at::MemoryFormat> format) {
  c10::OptionalDeviceGuard guard(with_index(device.value_or(Device(kSim))));
  return at::detail::empty_generic(
      size, &device_allocator_, c10::DispatchKeySet(c10::DispatchKey::PrivateUse1), c10::dtype_or_default(dtype),
      format);
}

Tensor empty_strided(at::IntArrayRef size, at::IntArrayRef stride, std::optional<at::ScalarType> dtype,
                     std::optional<at::Layout>, std::optional<Device> device, std::optional<bool>) {
  return empty_at(size, stride, c10::dtype_or_default(dtype), with_index(device.value_or(Device(kSim))));
}

Tensor as_strided(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride, std::optional<int64_t> offset) {
  return view_of(self, self.scalar_type(), size, stride, offset.value_or(self.storage_offset()));
}

Tensor view(const Tensor& self, at::IntArrayRef size) {
  auto sizes = at::infer_size_dv(size, self.numel());
  auto strides = at::detail::computeStride(self.sizes(), self.strides(), sizes);
  TORCH_CHECK(strides.has_value(), "view size is not compatible with input tensor's size and stride");
  return view_of(self, self.scalar_type(), sizes, *strides, self.storage_offset());
}

Tensor reshape_alias(const Tensor& self, at::IntArrayRef size, at::IntArrayRef stride) {
  return view_of(self, self.scalar_type(), size, stride, self.storage_offset());
}

const Tensor& resize_(const Tensor& self, at::IntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  if (impl->sizes() == size) return self;
  impl->set_sizes_contiguous(size);
  size_t needed = (impl->storage_offset() + impl->numel()) * impl->itemsize();
  if (impl->numel() && impl->storage().nbytes() < needed) hooks()->resizePrivateUse1Bytes(impl->storage(), needed);
  return self;
}

Tensor& set_storage_offset(Tensor& self, at::Storage source, int64_t at, at::IntArrayRef size, at::IntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(at);
  if (stride.data() == nullptr || stride.size() != size.size()) {
    impl->set_sizes_contiguous(size);
  } else {
    impl->set_sizes_and_strides(size, stride);
  }
  return self;
}
Tensor& set_storage(Tensor& self, at::Storage source) {
  int64_t n = static_cast<int64_t>(source.nbytes() / self.itemsize());
  return set_storage_offset(self, std::move(source), 0, {n}, {});
}
Tensor& set_tensor(Tensor& self, const Tensor& source) {
  return set_storage_offset(self, source.storage(), source.storage_offset(), source.sizes(), source.strides());
}
Tensor& set_nothing(Tensor& self) {
  at::Storage none(at::Storage::use_byte_size_t(), 0, device_allocator_.allocate(0), &device_allocator_, true);
  return set_storage_offset(self, none, 0, {0}, {});
}

// A copy to a device begins when it is enqueued and its stream is free.
void takes_time(const Tensor& dst) {
  Lock lock(mutex_);
  DeviceIndex device = dst.device().index();
  Queue& queue = queues_[{device, current_stream(device)}];
  if (copies_per_s_ > 0) queue.ends_s = std::max(queue.ends_s, host_s_) + dst.nbytes() / copies_per_s_;
}

// A copy is late where CUDA's may be: on the device, and from or to pinned memory with non_blocking. Every other copy
// from the host has read its source, and every other copy to the host is done, when the call returns.
Tensor copy_from(const Tensor& src, const Tensor& dst, bool non_blocking) {
  if (dst.numel() == 0) return dst;
  if (is_sim(src) && is_sim(dst)) {
    auto from = back(src), to = back(dst);
    if (!is_ready(src, dst.device().index())) from = poison_like(from);
    mark_written(dst, dst.device().index());
    count("copies on a device");
    bool conj = src.is_conj() != dst.is_conj();
    enqueue(dst.device().index(), [=]() mutable { conj ? to.copy_(from.conj()) : to.copy_(from); });
    if (src.device() != dst.device()) drain_all();
    return dst;
  }
  auto kind = [&](const char* where, const Tensor& host, bool late) {
    bool pinned = host.is_contiguous() && is_pinned(host.data_ptr());
    return std::string("copies ") + where + (pinned ? ", pinned" : ", pageable") + (late ? ", late" : ", blocking");
  };
  bool plain = src.scalar_type() == dst.scalar_type() && src.is_contiguous() && dst.is_contiguous();
  if (is_sim(dst)) {
    auto to = back(dst);
    bool late = non_blocking && src.is_contiguous() && is_pinned(src.data_ptr());
    auto from = late ? at::from_blob(src.data_ptr(), src.sizes(), src.strides(), src.options()) : src.detach().clone();
    enqueue(dst.device().index(), [=]() mutable { to.copy_(from); });
    if (late) mark_used(src.data_ptr(), dst.device().index());
    takes_time(dst);
    mark_written(dst, dst.device().index());
    count(kind("to a device", src, late));
    if (!non_blocking) host_waits(dst.device().index(), current_stream(dst.device().index()), "waits for a copy");
    return dst;
  }
  auto from = back(src);
  if (!is_ready(src, src.device().index())) from = poison_like(from);
  bool late = non_blocking && plain && is_pinned(dst.data_ptr());
  count(kind("to the host", dst, late));
  if (late) {
    auto to = at::from_blob(dst.data_ptr(), dst.sizes(), dst.strides(), dst.options());
    enqueue(src.device().index(), [=]() mutable { to.copy_(from); });
    mark_used(dst.data_ptr(), src.device().index());
  } else {
    host_waits(src.device().index(), current_stream(src.device().index()), "waits for a copy");
    dst.detach().copy_(from);
  }
  return dst;
}

Tensor copy_from_and_resize(const Tensor& src, const Tensor& dst) {
  if (dst.sizes() != src.sizes()) const_cast<Tensor&>(dst).resize_(src.sizes());
  return copy_from(src, dst, false);
}

at::Scalar local_scalar_dense(const Tensor& self) {
  auto host = back(self);
  if (!is_ready(self, self.device().index())) host = poison_like(host);
  host_waits(self.device().index(), current_stream(self.device().index()), "waits for a number");
  return at::_local_scalar_dense(host);
}

// ``parameter.data = device tensor`` for a parameter that was on the CPU: FSDP2 and Module.to do that.
bool has_compatible_shallow_copy_type(const Tensor& self, const Tensor& from) {
  auto dense = [](const Tensor& t) { return t.layout() == at::kStrided && (is_sim(t) || t.device().is_cpu()); };
  return dense(self) && dense(from);
}

void record_stream(Tensor& self, at::Stream stream) {
  device_allocator_.recordStream(self.storage().data_ptr(), stream);
}

// --- every other operator: torch's CPU kernel on the back ---------------------------------------------------------------

bool writes(const c10::Argument& argument) {
  const auto* alias = argument.alias_info();
  if (alias == nullptr) return false;
  if (alias->isWrite()) return true;
  for (const auto& held : alias->containedTypes())
    if (held.isWrite()) return true;
  return false;
}

struct Twins {
  std::vector<std::pair<Tensor, Tensor>> pairs;  // (device, CPU)
  std::vector<Tensor> written;                   // on the device
  bool argument_is_written = false;
  bool has_host = false;                         // a CPU tensor that is no scalar
  bool has_generator = false;
  bool has_list = false;
  bool has_empty = false;
  bool has_changing = false;                     // a CPU tensor that its owner may change
  std::optional<Device> device;

  Tensor of(const Tensor& t) {
    if (!is_sim(t)) {
      has_host |= t.defined() && t.dim() > 0;
      has_changing |= t.defined() && !t.unsafeGetTensorImpl()->is_wrapped_number();
      return t;
    }
    has_empty |= t.numel() == 0;
    if (!device) device = t.device();
    if (argument_is_written) written.push_back(t);
    // An output without elements may be resized, which a view of the back can't be.
    auto twin = t.numel() == 0 ? at::empty_strided(t.sizes(), t.strides(), t.options().device(at::kCPU)) : back(t);
    pairs.emplace_back(t, twin);
    return twin;
  }

  c10::IValue argument(const c10::IValue& arg) {
    if (arg.isTensor()) return of(arg.toTensor());
    if (arg.isTensorList() || arg.isOptionalTensorList()) has_list = true;
    if (arg.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : arg.toTensorVector()) list.push_back(of(t));
      return list;
    }
    if (arg.isOptionalTensorList()) {
      c10::List<std::optional<Tensor>> list;
      for (const std::optional<Tensor>& t : arg.toOptionalTensorVector())
        list.push_back(t ? std::optional<Tensor>(of(*t)) : std::nullopt);
      return list;
    }
    if (arg.isDevice() && arg.toDevice().type() == kSim) {
      if (!device) device = with_index(arg.toDevice());
      return Device(c10::DeviceType::CPU);
    }
    if (arg.isGenerator() && arg.toGenerator().device().type() == kSim) {
      has_generator = true;
      return static_cast<Generator*>(arg.toGenerator().unsafeGetGeneratorImpl())->host;
    }
    return arg;
  }

  Tensor returned(const Tensor& t, Device where) {
    if (!t.defined() || t.device().type() != c10::DeviceType::CPU) return t;
    for (auto& [mine, twin] : pairs)
      if (twin.is_same(t)) return mine;
    for (auto& [mine, twin] : pairs)
      if (t.storage().data() != nullptr && twin.storage().data() == t.storage().data() && mine.numel())
        return view_of(mine, t.scalar_type(), t.sizes(), t.strides(), t.storage_offset());
    return to_sim(t, where);
  }
};

void call_drawing_from(DeviceIndex device, const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  Lock lock(mutex_);
  auto* host = at::detail::getDefaultCPUGenerator().unsafeGetGeneratorImpl();
  auto* own = default_generator(device).unsafeGetGeneratorImpl();
  auto kept = host->get_state();
  host->set_state(*own->get_state());
  op.callBoxed(stack);
  own->set_state(*host->get_state());
  host->set_state(*kept);
}

// Whether an operator writes its first argument, reads nothing that may change before it runs, and gives that back.
bool can_be_late(const c10::OperatorHandle& op, const Twins& twins) {
  const auto& schema = op.schema();
  bool in_place = schema.name().back() == '_' && schema.returns().size() == 1 && writes(schema.arguments()[0]) &&
                  schema.returns()[0].alias_info() != nullptr;
  return in_place && twins.written.size() == 1 && !twins.has_list && !twins.has_empty && !twins.has_changing &&
         !twins.has_generator && !op.hasTag(at::Tag::nondeterministic_seeded);
}

void call_late(const c10::OperatorHandle& op, std::vector<c10::IValue> args, Device where, const Twins& twins,
               bool ready) {
  Tensor written = twins.written[0];
  auto poisoned = ready ? Tensor() : back(written);
  mark_written(written, where.index());
  enqueue(where.index(), [op, args = std::move(args), poisoned]() mutable {
    at::AutoDispatchBelowADInplaceOrView below;
    op.callBoxed(args);
    if (poisoned.defined() && poisoned.numel()) poisoned.copy_(poison_like(poisoned));
  });
}

void fallback(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t first = stack->size() - schema.arguments().size();
  Twins twins;
  std::vector<c10::IValue> args;
  for (size_t i = first; i < stack->size(); i++) {
    twins.argument_is_written = writes(schema.arguments()[i - first]);
    args.push_back(twins.argument((*stack)[i]));
  }
  Device where = twins.device.value_or(Device(kSim, current_device_));
  const auto& name = schema.name();
  TORCH_CHECK(twins.pairs.empty() || !twins.has_host || name.find("index") != std::string::npos,
              "Expected all tensors to be on the same device, but found at least two devices, ", where, " and cpu! (",
              name, ")");
  bool ready = true;
  for (auto& [mine, twin] : twins.pairs) ready = ready && is_ready(mine, where.index());
  if (can_be_late(op, twins)) {
    call_late(op, std::move(args), where, twins, ready);
    auto self = (*stack)[first];
    stack->erase(stack->begin() + first, stack->end());
    stack->push_back(self);
    return;
  }
  drain_current(where.index());
  std::copy(args.begin(), args.end(), stack->begin() + first);
  {
    at::AutoDispatchBelowADInplaceOrView below;
    if (op.hasTag(at::Tag::nondeterministic_seeded) && !twins.has_generator) {
      call_drawing_from(where.index(), op, stack);
    } else {
      op.callBoxed(stack);
    }
  }
  for (auto& [mine, twin] : twins.pairs) {
    if (mine.numel() == 0 && twin.numel() != 0) {  // an output that was resized
      mine.resize_(twin.sizes());
      back(mine).copy_(twin);
    }
  }
  for (size_t i = stack->size() - schema.returns().size(); i < stack->size(); i++) {
    auto& value = (*stack)[i];
    bool is_fresh = schema.returns()[i - (stack->size() - schema.returns().size())].alias_info() == nullptr;
    auto taken = [&](const Tensor& t) {
      auto mine = twins.returned(t, where);
      if (is_fresh && is_sim(mine)) twins.written.push_back(mine);
      return mine;
    };
    if (value.isTensor()) {
      value = taken(value.toTensor());
    } else if (value.isTensorList()) {
      c10::List<Tensor> list;
      for (const Tensor& t : value.toTensorVector()) list.push_back(taken(t));
      value = list;
    }
  }
  for (const Tensor& t : twins.written) {
    mark_written(t, where.index());
    if (!ready && t.numel()) back(t).copy_(poison_like(back(t)));
  }
}

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", TORCH_FN(empty));
  m.impl("empty_strided", TORCH_FN(empty_strided));
  m.impl("as_strided", TORCH_FN(as_strided));
  m.impl("view", TORCH_FN(view));
  m.impl("_reshape_alias", TORCH_FN(reshape_alias));
  m.impl("resize_", TORCH_FN(resize_));
  m.impl("set_.source_Storage_storage_offset", TORCH_FN(set_storage_offset));
  m.impl("set_.source_Storage", TORCH_FN(set_storage));
  m.impl("set_.source_Tensor", TORCH_FN(set_tensor));
  m.impl("set_", TORCH_FN(set_nothing));
  m.impl("_copy_from", TORCH_FN(copy_from));
  m.impl("_copy_from_and_resize", TORCH_FN(copy_from_and_resize));
  m.impl("_local_scalar_dense", TORCH_FN(local_scalar_dense));
  m.impl("_has_compatible_shallow_copy_type", TORCH_FN(has_compatible_shallow_copy_type));
  m.impl("record_stream", TORCH_FN(record_stream));
  // torch decomposes these for a device without kernels of its own, and rounds otherwise than the CPU kernels.
  for (const char* name : {"silu_backward", "native_layer_norm", "native_layer_norm_backward"})
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&fallback>());
}

// --- collectives ----------------------------------------------------------------------------------------------------

struct Done final : c10d::Work {
  explicit Done(const std::vector<Tensor>& out)
      : future_(c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()))) {
    future_->markCompleted(c10::IValue(out));
    finish();
  }
  bool isCompleted() override { return true; }
  bool wait(std::chrono::milliseconds) override { return true; }
  c10::intrusive_ptr<c10::ivalue::Future> getFuture() override { return future_; }
  c10::intrusive_ptr<c10::ivalue::Future> future_;
};

// gloo's collectives on the device's memory. A collective that is not here is not supported.
class Collectives final : public c10d::Backend {
 public:
  using Many = std::vector<Tensor>;
  using W = c10::intrusive_ptr<c10d::Work>;
  explicit Collectives(c10::intrusive_ptr<c10d::Backend> inner)
      : Backend(inner->getRank(), inner->getSize()), inner_(std::move(inner)) {}
  const std::string getBackendName() const override { return "simccl"; }
  bool supportsCoalescing() const override { return false; }
  void setSequenceNumberForGroup() override { inner_->setSequenceNumberForGroup(); }
  uint64_t getSequenceNumberForGroup() override { return inner_->getSequenceNumberForGroup(); }
  void setTimeout(std::chrono::milliseconds t) override { inner_->setTimeout(t); }

  W barrier(const c10d::BarrierOptions& o) override { return inner_->barrier(o); }
  W broadcast(Many& t, const c10d::BroadcastOptions& o) override {
    auto a = on(t, true);
    return inner_->broadcast(a, o);
  }
  W scatter(Many& out, std::vector<Many>& in, const c10d::ScatterOptions& o) override {
    auto a = on(out, true);
    auto b = on(in);
    return inner_->scatter(a, b, o);
  }
  W allgather(std::vector<Many>& out, Many& in, const c10d::AllgatherOptions& o) override {
    auto a = on(out, true);
    auto b = on(in);
    return inner_->allgather(a, b, o);
  }
  W _allgather_base(Tensor& out, Tensor& in, const c10d::AllgatherOptions& o) override {
    auto a = on(out, true), b = on(in);
    return inner_->_allgather_base(a, b, o);
  }
  W allreduce(Many& t, const c10d::AllreduceOptions& o) override {
    auto a = on(t, true);
    return averaged(o, a, [&](const auto& p) { return inner_->allreduce(a, p); });
  }
  W alltoall_base(Tensor& out, Tensor& in, std::vector<int64_t>& into, std::vector<int64_t>& from,
                  const c10d::AllToAllOptions& o) override {
    auto a = on(out, true), b = on(in);
    return inner_->alltoall_base(a, b, into, from, o);
  }
  W _reduce_scatter_base(Tensor& out, Tensor& in, const c10d::ReduceScatterOptions& o) override {
    auto a = on(out, true), b = on(in);
    Many outs{a};
    return averaged(o, outs, [&](const auto& p) { return inner_->_reduce_scatter_base(a, b, p); });
  }

 private:
  static Tensor on(const Tensor& t, bool is_written = false) {
    TORCH_CHECK(is_sim(t), "simccl: Tensors must be simgpu and dense (no backend for ", t.device(), ")");
    drain_current(t.device().index());
    if (is_written) mark_written(t, t.device().index());
    return back(t, true);
  }
  static Many on(const Many& all, bool are_written = false) {
    Many made;
    for (const auto& t : all) made.push_back(on(t, are_written));
    return made;
  }
  static std::vector<Many> on(const std::vector<Many>& all, bool are_written = false) {
    std::vector<Many> made;
    for (const auto& t : all) made.push_back(on(t, are_written));
    return made;
  }
  // gloo can't average everything: a sum, then a division.
  template <typename Options, typename Run>
  W averaged(const Options& options, Many& out, Run run) {
    if (options.reduceOp != c10d::ReduceOp::AVG) return run(options);
    Options sum(options);
    sum.reduceOp = c10d::ReduceOp::SUM;
    run(sum)->wait();
    for (auto& t : out) t.div_(getSize());
    return c10::make_intrusive<Done>(out);
  }
  c10::intrusive_ptr<c10d::Backend> inner_;
};

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  c10::SetAllocator(kSim, &device_allocator_, 1);
  at::RegisterPrivateUse1HooksInterface(hooks());
  m.def("device_count", [] { return int(kDevices); });
  m.def("current_device", [] { return int(current_device_); });
  m.def("set_device", [](int i) { Guard().setDevice(Device(kSim, static_cast<DeviceIndex>(i))); });
  at::setHostAllocator(kSim, &host_allocator_, 1);
  m.def("synchronize", [] { host_waits_for_all(); });
  m.def("counts", [](bool own) { return own ? own_counts_ : all_counts_; });
  m.def("pinned_bytes", &pinned_bytes);
  m.def("used_bytes", [](int i) { return used_[static_cast<DeviceIndex>(i)].now; });
  m.def("peak_bytes", [](int i) { return used_[static_cast<DeviceIndex>(i)].peak; });
  m.def("reset_peak", [](int i) {
    Lock lock(mutex_);
    Used& used = used_[static_cast<DeviceIndex>(i)];
    used.peak = used.now;
  });
  m.def("schedule", &set_schedule);
  m.def("advance", &advance);
  m.def("copies_take", [](double bytes_per_s) { copies_per_s_ = bytes_per_s; });
  m.def("spend", [](double seconds) { host_s_ += seconds; });
  m.def("now", [] { return host_s_; });
  m.def("default_generator", [](int i) { return default_generator(static_cast<DeviceIndex>(i)); });
  m.def("collectives", [](const c10::intrusive_ptr<c10d::Backend>& inner) -> c10::intrusive_ptr<c10d::Backend> {
    return c10::make_intrusive<Collectives>(inner);
  });
}
