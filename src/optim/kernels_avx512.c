#define EVEN_OPTIM_TABLE even_optim_kernels_avx512
#define EVEN_OPTIM_NAME "avx512"
#include "optim/kernel_body.h"
