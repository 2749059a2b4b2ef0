# Settings for Horovod 0.28.1 with torch 2.1 or later.
#
# CMake reads this file as the toolchain file and, as the line below asks, once more at the end of
# project(horovod): what project() chose for the compiler is then replaced.
set(CMAKE_PROJECT_horovod_INCLUDE "${CMAKE_CURRENT_LIST_FILE}")

# Horovod asks for C++14, torch's headers need C++17: the option that "14" stands for is the newer.
set(CMAKE_CXX14_STANDARD_COMPILE_OPTION "-std=c++17")

# Without debugging symbols: a sixteenth of the size, and faster to compile.
set(CMAKE_CXX_FLAGS_RELWITHDEBINFO "-O2 -DNDEBUG")

# Seen from site-packages/horovod/torch: lib of a virtual environment, where the wheels of MPI put
# their library, and that of torch. No folder of the building environment gets into the wheel.
set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)
set(CMAKE_INSTALL_RPATH "$ORIGIN/../../../.." "$ORIGIN/../../torch/lib")
