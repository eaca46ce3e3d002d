#include <cstring>

#include "check.h"

// Runs every test, or those whose name contains the first argument.
int main(int argc, char** argv) {
    int count = 0;
    for (const auto& test : forebay::test::cases()) {
        if (argc > 1 && std::strstr(test.name, argv[1]) == nullptr) {
            continue;
        }
        test.body();
        std::printf("ok %s\n", test.name);
        ++count;
    }
    std::printf("%d tests passed\n", count);
    return count > 0 ? 0 : 1;
}
