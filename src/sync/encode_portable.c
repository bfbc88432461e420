/* The encodings for any machine. */
#define EVEN_ENCODER_TABLE even_encoders_portable
#define EVEN_ENCODER_NAME "portable"
#include "sync/encode_body.h"
