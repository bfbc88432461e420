#define EVEN_OPTIM_TABLE even_optim_kernels_portable
#define EVEN_OPTIM_NAME "portable"
#include "optim/kernel_body.h"
