#include <stdexcept>
#include <utility>

#include "bindings.h"

namespace forebay::bind {
namespace {

using SpanTuple = std::tuple<std::uint64_t, Address, std::size_t>;

TicketHandle transfer(const FileQueueHandle& self, FileAction action, const FileSetHandle& files,
                      const std::vector<SpanTuple>& spans, int priority,
                      const std::vector<TicketHandle>& after,
                      const std::optional<TicketHandle>& piecewise) {
    const WithoutGil released;
    std::vector<FileSpan> list;
    list.reserve(spans.size());
    for (const auto& [offset, address, bytes] : spans) {
        list.push_back({offset, address, bytes});
    }
    FileOrder order{priority, tickets_of(after), piecewise ? piecewise->it : nullptr};
    return {self.it->transfer(action, files.it, std::move(list), std::move(order))};
}

void bind_backends(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<FileBackendHandle>(module, "FileBackend");
    nb::class_<ThreadBackendHandle, FileBackendHandle>(module, "ThreadBackend")
        .def(
            "__init__",
            [](ThreadBackendHandle* self, std::size_t threads) {
                new (self) ThreadBackendHandle{{make_thread_backend(threads)}};
            },
            "threads"_a);
    nb::class_<UringBackendHandle, FileBackendHandle>(module, "UringBackend")
        .def(
            "__init__",
            [](UringBackendHandle* self, std::size_t depth) {
                new (self) UringBackendHandle{{make_uring_backend(depth)}};
            },
            "depth"_a);
    nb::class_<ScriptedBackendHandle, FileBackendHandle>(module, "ScriptedBackend")
        .def(
            "__init__",
            [](ScriptedBackendHandle* self, const FileBackendHandle& inner, std::uint64_t seed,
               std::uint64_t max_delay_us, std::int64_t fail_at, int fail_errno,
               std::int64_t short_at, std::size_t short_bytes) {
                const FileScript script{seed,       max_delay_us, fail_at,
                                        fail_errno, short_at,     short_bytes};
                new (self) ScriptedBackendHandle{{make_scripted_backend(inner.it, script)}};
            },
            "inner"_a, "seed"_a = 0, "max_delay_us"_a = 0, "fail_at"_a = -1, "fail_errno"_a = 5,
            "short_at"_a = -1, "short_bytes"_a = 0);
}

void bind_set(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<FileSetHandle>(module, "FileSet")
        .def(
            "__init__",
            [](FileSetHandle* self, const std::vector<int>& descriptors,
               std::vector<std::string> names, std::size_t stripe_bytes) {
                new (self) FileSetHandle{
                    std::make_shared<const FileSet>(descriptors, std::move(names), stripe_bytes)};
            },
            "descriptors"_a, "names"_a, "stripe_bytes"_a)
        .def_prop_ro("files", [](const FileSetHandle& self) { return self.it->files(); });
}

void bind_queue(nb::module_& module) {
    using namespace nb::literals;
    nb::class_<FileQueueHandle>(module, "FileQueue")
        .def(
            "__init__",
            [](FileQueueHandle* self, const FileBackendHandle& backend, std::size_t depth,
               std::size_t block_bytes, bool single_submit, bool overlap_events, std::string name) {
                FileQueueOptions options{
                    depth, block_bytes, single_submit ? Handover::single : Handover::batched,
                    overlap_events ? Refill::at_once : Refill::when_empty, std::move(name)};
                auto queue = std::make_shared<FileQueue>(backend.it, std::move(options));
                ProcessEnd::instance().add(queue);
                new (self) FileQueueHandle{std::move(queue)};
            },
            "backend"_a, "depth"_a = 8, "block_bytes"_a = 1 << 20, "single_submit"_a = false,
            "overlap_events"_a = true, "name"_a = "files")
        .def(
            "read",
            [](const FileQueueHandle& self, const FileSetHandle& files,
               const std::vector<SpanTuple>& spans, int priority,
               const std::vector<TicketHandle>& after,
               const std::optional<TicketHandle>& piecewise) {
                return transfer(self, FileAction::read, files, spans, priority, after, piecewise);
            },
            "files"_a, "spans"_a, "priority"_a = 0, "after"_a = std::vector<TicketHandle>{},
            "piecewise"_a = nb::none())
        .def(
            "write",
            [](const FileQueueHandle& self, const FileSetHandle& files,
               const std::vector<SpanTuple>& spans, int priority,
               const std::vector<TicketHandle>& after,
               const std::optional<TicketHandle>& piecewise) {
                return transfer(self, FileAction::write, files, spans, priority, after, piecewise);
            },
            "files"_a, "spans"_a, "priority"_a = 0, "after"_a = std::vector<TicketHandle>{},
            "piecewise"_a = nb::none())
        .def("cancel", [](const FileQueueHandle& self,
                          const TicketHandle& ticket) { self.it->cancel(ticket.it); })
        .def_prop_ro("bytes_read",
                     [](const FileQueueHandle& self) { return self.it->counters().bytes_read; })
        .def_prop_ro("bytes_written",
                     [](const FileQueueHandle& self) { return self.it->counters().bytes_written; })
        .def_prop_ro("blocks",
                     [](const FileQueueHandle& self) { return self.it->counters().blocks; })
        .def(
            "close", [](const FileQueueHandle& self) { self.it->close(); },
            nb::call_guard<WithoutGil>());
}

}  // namespace

void bind_files(nb::module_& module) {
    bind_backends(module);
    bind_set(module);
    bind_queue(module);
}

}  // namespace forebay::bind
