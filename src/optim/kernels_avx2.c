#define EVEN_OPTIM_TABLE even_optim_kernels_avx2
#define EVEN_OPTIM_NAME "avx2"
#include "optim/kernel_body.h"
