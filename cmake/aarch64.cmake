# A toolchain file: gcc for aarch64, its tests run by qemu-user. scripts/aarch64.sh sets EVENSTEP_AARCH64_ROOT, where its libraries lie.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)
set(ENV{PKG_CONFIG_LIBDIR} "$ENV{EVENSTEP_AARCH64_ROOT}/usr/lib/aarch64-linux-gnu/pkgconfig")
set(ENV{PKG_CONFIG_SYSROOT_DIR} "$ENV{EVENSTEP_AARCH64_ROOT}")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64-static -L /usr/aarch64-linux-gnu)
