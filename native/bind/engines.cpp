#include <utility>

#include "bindings.h"

namespace forebay::bind {

void bind_engines(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<EngineHandle>(module, "CopyEngine")
        .def(
            "register_host",
            [](const EngineHandle& self, Address address, std::size_t bytes) {
                self.it->register_host(address, bytes);
            },
            "addr"_a, "bytes"_a, nb::call_guard<WithoutGil>())
        .def(
            "unregister_host",
            [](const EngineHandle& self, Address address) { self.it->unregister_host(address); },
            "addr"_a, nb::call_guard<WithoutGil>());
    nb::class_<MemcpyHandle, EngineHandle>(module, "MemcpyEngine")
        .def("__init__", [](MemcpyHandle* self) {
            new (self) MemcpyHandle{{std::make_shared<MemcpyEngine>()}};
        });
    nb::class_<CudaHandle, EngineHandle>(module, "CudaEngine")
        .def(
            "__init__",
            [](CudaHandle* self, int device) { new (self) CudaHandle{{make_cuda_engine(device)}}; },
            "device"_a = 0);
    nb::class_<ScriptedHandle, EngineHandle>(module, "ScriptedEngine")
        .def(
            "__init__",
            [](ScriptedHandle* self, const EngineHandle& inner, std::uint64_t seed,
               std::uint64_t max_delay_us, std::int64_t fail_at, std::string fail_text) {
                Script script{seed, max_delay_us, fail_at, std::move(fail_text)};
                new (self)
                    ScriptedHandle{{std::make_shared<ScriptedEngine>(inner.it, std::move(script))}};
            },
            "inner"_a, "seed"_a, "max_delay_us"_a, "fail_at"_a = -1,
            "fail_text"_a = "scripted failure");
}

}  // namespace forebay::bind
