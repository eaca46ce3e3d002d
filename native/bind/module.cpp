#include <algorithm>
#include <cstdlib>
#include <stdexcept>

#include "bindings.h"

namespace forebay::bind {

// Never destroyed: threads may still ask it while the process ends.
ProcessEnd& ProcessEnd::instance() {
    static auto* const end = new ProcessEnd;
    return *end;
}

void ProcessEnd::add(const std::shared_ptr<Pool>& pool) {
    std::erase_if(pools_, [](const auto& weak) { return weak.expired(); });
    pools_.push_back(pool);
}

void ProcessEnd::add(const std::shared_ptr<Link>& link) {
    std::erase_if(links_, [](const auto& weak) { return weak.expired(); });
    links_.push_back(link);
}

void ProcessEnd::add(const std::shared_ptr<FileQueue>& queue) {
    std::erase_if(file_queues_, [](const auto& weak) { return weak.expired(); });
    file_queues_.push_back(queue);
}

// Links first: what they still have in flight may end in a pool.
void ProcessEnd::begin() {
    ending_thread_ = std::this_thread::get_id();
    ending_ = true;
    // At most the time that a thread takes to get the GIL. Bounded, because a forked child inherits
    // the count of threads that it does not have.
    for (int i = 0; i < 2000 && num_entering_ > 0; ++i) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    for (const auto& weak : file_queues_) {
        if (const auto queue = weak.lock()) {
            queue->close();
        }
    }
    for (const auto& weak : links_) {
        if (const auto link = weak.lock()) {
            link->close();
        }
    }
    for (const auto& weak : pools_) {
        if (const auto pool = weak.lock()) {
            pool->close();
        }
    }
}

void ProcessEnd::enter() noexcept {
    ++num_entering_;
    if (ending_ && ending_thread_ != std::this_thread::get_id()) {
        --num_entering_;
        while (true) {
            std::this_thread::sleep_for(std::chrono::hours(1));
        }
    }
}

void ProcessEnd::leave() noexcept { --num_entering_; }

DType parse_dtype(const std::string& name) {
    if (name == "float32") {
        return DType::float32;
    }
    if (name == "bfloat16") {
        return DType::bfloat16;
    }
    if (name == "float16") {
        return DType::float16;
    }
    throw std::invalid_argument("unknown element type '" + name +
                                "'\nhint: one of float32, bfloat16, float16");
}

std::vector<TicketPtr> tickets_of(const std::vector<TicketHandle>& handles) {
    std::vector<TicketPtr> tickets;
    tickets.reserve(handles.size());
    for (const TicketHandle& handle : handles) {
        tickets.push_back(handle.it);
    }
    return tickets;
}

const KernelTable& chosen_kernels() {
    const char* forced = std::getenv("FOREBAY_KERNEL_LEVEL");
    return kernel_table(forced != nullptr ? forced : "");
}

}  // namespace forebay::bind

NB_MODULE(_core, module) {
    namespace nb = nanobind;
    using namespace forebay::bind;
    // Objects that live until the interpreter's end are not an error of the user's.
    nb::set_leak_warnings(false);
    module.doc() = "Native core of forebay: update kernels, worker pool, links. See _core.pyi.";
    bind_tickets(module);
    bind_numbers(module);
    bind_pool(module);
    bind_engines(module);
    bind_links(module);
    bind_files(module);
    nb::module_::import_("atexit").attr("register")(nb::cpp_function([] {
        const WithoutGil released;
        ProcessEnd::instance().begin();
    }));
}
