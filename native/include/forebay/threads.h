// A thread that knows which process it belongs to. After fork() the child has none of its
// parent's threads: joining one there would block for ever, so it is let go instead.
#pragma once

#include <sys/types.h>

#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace forebay {

class OwnThread {
public:
    template <typename Body>
    OwnThread(const std::string& name, Body body) : process_(current_process()) {
        thread_ = std::thread([name, body = std::move(body)]() mutable {
            prepare_thread(name);
            body();
        });
    }
    OwnThread(OwnThread&&) = default;
    OwnThread& operator=(OwnThread&&) = delete;
    ~OwnThread() { join(); }

    bool in_its_process() const noexcept { return process_ == current_process(); }
    void join();
    // "" on success, else why the thread could not be bound to these processors.
    std::string pin(const std::vector<int>& cpus);
    // Lets threads of usual niceness run before the calling one, wherever they meet.
    static void give_way() noexcept;

private:
    static pid_t current_process() noexcept;
    // Names the thread and sets the floating-point mode: nearest even, subnormals kept. A thread
    // inherits the mode of its creator, and torch.set_flush_denormal changes that one.
    static void prepare_thread(const std::string& name);

    pid_t process_;
    std::thread thread_;
};

}  // namespace forebay
