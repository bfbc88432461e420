/* The reductions for any machine. */
#define EVEN_KERNEL_TABLE even_kernels_portable
#define EVEN_KERNEL_NAME "portable"
#include "comm/kernel_body.h"
