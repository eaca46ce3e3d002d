// The CUDA copy engine, against the driver API's C interface. The types and the few constants are
// declared here from the driver's stable ABI, so neither headers nor libraries of CUDA are needed.
#include <dlfcn.h>

#include <mutex>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "forebay/copy_engine.h"

namespace forebay {
namespace {

using CUresult = int;
using CUdevice = int;
using CUcontext = void*;
using CUstream = void*;
using CUevent = void*;
using CUdeviceptr = unsigned long long;

constexpr CUresult kSuccess = 0;
constexpr CUresult kNotReady = 600;
// CU_EVENT_BLOCKING_SYNC | CU_EVENT_DISABLE_TIMING: a lane that waits sleeps instead of spinning.
constexpr unsigned kEventFlags = 0x1U | 0x2U;
// CU_MEMHOSTREGISTER_PORTABLE: page-locked for every context of the process.
constexpr unsigned kRegisterPortable = 0x1U;

struct Driver {
    CUresult (*init)(unsigned);
    CUresult (*device_get)(CUdevice*, int);
    CUresult (*primary_retain)(CUcontext*, CUdevice);
    CUresult (*primary_release)(CUdevice);
    CUresult (*context_set)(CUcontext);
    CUresult (*context_push)(CUcontext);
    CUresult (*context_pop)(CUcontext*);
    CUresult (*memcpy_async)(CUdeviceptr, CUdeviceptr, std::size_t, CUstream);
    CUresult (*event_create)(CUevent*, unsigned);
    CUresult (*event_record)(CUevent, CUstream);
    CUresult (*event_query)(CUevent);
    CUresult (*event_synchronize)(CUevent);
    CUresult (*event_destroy)(CUevent);
    CUresult (*stream_wait_event)(CUstream, CUevent, unsigned);
    CUresult (*host_register)(void*, std::size_t, unsigned);
    CUresult (*host_unregister)(void*);
    CUresult (*error_name)(CUresult, const char**);

    std::string name_of(CUresult error) const {
        const char* name = nullptr;
        if (error_name(error, &name) == kSuccess && name != nullptr) {
            return name;
        }
        return "CUDA error " + std::to_string(error);
    }

    void check(CUresult error, const char* call) const {
        if (error != kSuccess) {
            throw std::runtime_error(name_of(error) + " from " + call);
        }
    }
};

template <typename Function>
void find(void* library, const char* symbol, Function& function) {
    void* address = dlsym(library, symbol);
    if (address == nullptr) {
        throw std::runtime_error("the CUDA driver library has no " + std::string(symbol) +
                                 "\nhint: update the NVIDIA driver");
    }
    function = reinterpret_cast<Function>(address);
}

Driver load_driver() {
    // Never closed: the driver keeps threads and exit handlers of its own.
    void* library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (library == nullptr) {
        const char* reason = dlerror();
        throw std::runtime_error("the CUDA driver is not available: " +
                                 std::string(reason != nullptr ? reason : "dlopen failed") +
                                 "\nhint: install the NVIDIA driver, or use the cpu accelerator");
    }
    Driver driver{};
    find(library, "cuInit", driver.init);
    find(library, "cuDeviceGet", driver.device_get);
    find(library, "cuDevicePrimaryCtxRetain", driver.primary_retain);
    find(library, "cuDevicePrimaryCtxRelease_v2", driver.primary_release);
    find(library, "cuCtxSetCurrent", driver.context_set);
    find(library, "cuCtxPushCurrent_v2", driver.context_push);
    find(library, "cuCtxPopCurrent_v2", driver.context_pop);
    find(library, "cuMemcpyAsync", driver.memcpy_async);
    find(library, "cuEventCreate", driver.event_create);
    find(library, "cuEventRecord", driver.event_record);
    find(library, "cuEventQuery", driver.event_query);
    find(library, "cuEventSynchronize", driver.event_synchronize);
    find(library, "cuEventDestroy_v2", driver.event_destroy);
    find(library, "cuStreamWaitEvent", driver.stream_wait_event);
    find(library, "cuMemHostRegister_v2", driver.host_register);
    find(library, "cuMemHostUnregister", driver.host_unregister);
    find(library, "cuGetErrorName", driver.error_name);
    return driver;
}

// The device's primary context and a store of events, shared by the engine and its fences: a
// fence may outlive the engine.
class Context {
public:
    explicit Context(int device) : driver_(load_driver()) {
        driver_.check(driver_.init(0), "cuInit");
        driver_.check(driver_.device_get(&device_, device), "cuDeviceGet");
        driver_.check(driver_.primary_retain(&context_, device_), "cuDevicePrimaryCtxRetain");
    }
    // At process exit the driver may be gone already; its errors mean nothing any more.
    ~Context() {
        if (driver_.context_push(context_) == kSuccess) {
            for (const CUevent event : free_events_) {
                driver_.event_destroy(event);
            }
            CUcontext popped = nullptr;
            driver_.context_pop(&popped);
        }
        driver_.primary_release(device_);
    }
    Context(const Context&) = delete;
    Context& operator=(const Context&) = delete;

    const Driver& driver() const noexcept { return driver_; }
    CUcontext handle() const noexcept { return context_; }

    // The calling thread's context must be this one.
    CUevent take_event() {
        {
            const std::lock_guard lock(mutex_);
            if (!free_events_.empty()) {
                const CUevent event = free_events_.back();
                free_events_.pop_back();
                return event;
            }
        }
        CUevent event = nullptr;
        driver_.check(driver_.event_create(&event, kEventFlags), "cuEventCreate");
        return event;
    }

    void give_event(CUevent event) {
        const std::lock_guard lock(mutex_);
        free_events_.push_back(event);
    }

private:
    const Driver driver_;
    CUdevice device_ = 0;
    CUcontext context_ = nullptr;
    std::mutex mutex_;
    std::vector<CUevent> free_events_;
};

// Makes the context current for a call from a thread that is not a lane.
class Current {
public:
    explicit Current(const Context& context) : driver_(context.driver()) {
        driver_.check(driver_.context_push(context.handle()), "cuCtxPushCurrent");
    }
    ~Current() {
        CUcontext popped = nullptr;
        driver_.context_pop(&popped);
    }
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;

private:
    const Driver& driver_;
};

class CudaFence final : public Fence {
public:
    CudaFence(std::shared_ptr<Context> context, CUevent event)
        : context_(std::move(context)), event_(event) {}
    // An event may be recorded again as soon as nobody asks about this piece: a wait that a
    // stream has already enqueued keeps the earlier record.
    ~CudaFence() override { context_->give_event(event_); }
    CudaFence(const CudaFence&) = delete;
    CudaFence& operator=(const CudaFence&) = delete;

    CUevent event() const noexcept { return event_; }

    void wait() override {
        const Driver& driver = context_->driver();
        driver.check(driver.event_synchronize(event_), "cuEventSynchronize");
    }

    bool hold(Stream stream) override {
        const Current current(*context_);
        const Driver& driver = context_->driver();
        driver.check(driver.stream_wait_event(reinterpret_cast<CUstream>(stream), event_, 0),
                     "cuStreamWaitEvent");
        return true;
    }

private:
    std::shared_ptr<Context> context_;
    CUevent event_;
};

class CudaEngine final : public CopyEngine {
public:
    explicit CudaEngine(int device) : context_(std::make_shared<Context>(device)) {}

    void enter_lane() override {
        driver().check(driver().context_set(context_->handle()), "cuCtxSetCurrent");
    }

    std::shared_ptr<Fence> submit(Stream stream, const std::vector<CopySpan>& spans) override {
        const auto queue = reinterpret_cast<CUstream>(stream);
        for (const CopySpan& span : spans) {
            driver().check(driver().memcpy_async(span.destination, span.source, span.bytes, queue),
                           "cuMemcpyAsync");
        }
        auto fence = std::make_shared<CudaFence>(context_, context_->take_event());
        driver().check(driver().event_record(fence->event(), queue), "cuEventRecord");
        return fence;
    }

    void hold_stream(Stream stream, Event event) override {
        driver().check(driver().stream_wait_event(reinterpret_cast<CUstream>(stream),
                                                  reinterpret_cast<CUevent>(event), 0),
                       "cuStreamWaitEvent");
    }

    bool reached(Event event) override {
        const CUresult state = driver().event_query(reinterpret_cast<CUevent>(event));
        if (state == kNotReady) {
            return false;
        }
        driver().check(state, "cuEventQuery");
        return true;
    }

    void register_host(Address address, std::size_t bytes) override {
        const Current current(*context_);
        driver().check(
            driver().host_register(reinterpret_cast<void*>(address), bytes, kRegisterPortable),
            "cuMemHostRegister");
    }

    void unregister_host(Address address) override {
        const Current current(*context_);
        driver().check(driver().host_unregister(reinterpret_cast<void*>(address)),
                       "cuMemHostUnregister");
    }

private:
    const Driver& driver() const noexcept { return context_->driver(); }

    std::shared_ptr<Context> context_;
};

}  // namespace

CopyEnginePtr make_cuda_engine(int device) { return std::make_shared<CudaEngine>(device); }

}  // namespace forebay
