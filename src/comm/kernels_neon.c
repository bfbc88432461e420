/* The reductions for aarch64, whose baseline has NEON and the conversions of fp16. */
#include <arm_neon.h>

#define EVEN_KERNEL_TABLE even_kernels_neon
#define EVEN_KERNEL_NAME "neon"
#define EVEN_KERNEL_LOAD_F16(to, from)                            \
  do {                                                            \
    float16x8_t halves_ = vreinterpretq_f16_u16(vld1q_u16(from)); \
    vst1q_f32((to), vcvt_f32_f16(vget_low_f16(halves_)));         \
    vst1q_f32((to) + 4, vcvt_f32_f16(vget_high_f16(halves_)));    \
  } while (0)
#define EVEN_KERNEL_STORE_F16(to, from) \
  vst1q_u16((to),                       \
            vreinterpretq_u16_f16(vcombine_f16(vcvt_f16_f32(vld1q_f32(from)), vcvt_f16_f32(vld1q_f32((from) + 4)))))
#include "comm/kernel_body.h"
