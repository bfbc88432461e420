/* The encodings for x86-64 with AVX2. */
#define EVEN_ENCODER_TABLE even_encoders_avx2
#define EVEN_ENCODER_NAME "avx2"
#include "sync/encode_body.h"
