// The tests' own main: TEST registers a function, CHECK ends the program at the first failure.
#pragma once

#include <cstdio>
#include <cstdlib>
#include <vector>

namespace forebay::test {

struct Case {
    const char* name;
    void (*body)();
};

inline std::vector<Case>& cases() {
    static std::vector<Case> list;
    return list;
}

struct Register {
    Register(const char* name, void (*body)()) { cases().push_back({name, body}); }
};

}  // namespace forebay::test

#define TEST(name)                                                     \
    static void name();                                                \
    static const forebay::test::Register register_##name(#name, name); \
    static void name()

#define CHECK(condition)                                                                   \
    do {                                                                                   \
        if (!(condition)) {                                                                \
            std::fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition); \
            std::exit(1);                                                                  \
        }                                                                                  \
    } while (false)
