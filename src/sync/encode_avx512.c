/* The encodings for x86-64 with AVX-512 (F, BW, VL, DQ). */
#define EVEN_ENCODER_TABLE even_encoders_avx512
#define EVEN_ENCODER_NAME "avx512"
#include "sync/encode_body.h"
