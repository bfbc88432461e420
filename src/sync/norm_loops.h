/* The loops of norm_moments.c for one type of numbers: NUMBER, NAME(x). Included once for each. */

/* Adds `count` numbers, from `off`, or their squares, to the lanes: the same ones on every processor, and so the bits.
 */
static inline void NAME(add)(const NUMBER *x, size_t count, NUMBER off, bool squares, NUMBER *lane) {
  size_t i = 0;
  for (; i + LANES <= count; i += LANES) {
    for (size_t l = 0; l < LANES; l++) {
      NUMBER from = x[i + l] - off;
      lane[l] += squares ? from * from : from;
    }
  }
  for (size_t l = 0; l < count - i; l++) {
    NUMBER from = x[i + l] - off;
    lane[l] += squares ? from * from : from;
  }
}

static double NAME(flush)(NUMBER *lane) {
  double sum = 0.0;
  for (size_t l = 0; l < LANES; l++) {
    sum += (double)lane[l];
    lane[l] = 0;
  }
  return sum;
}

/* Of one channel whose numbers lie together, `inner` at a time. */
static double NAME(channel_sum)(const even_norm_layout *layout, const NUMBER *x, NUMBER off, bool squares) {
  NUMBER lane[LANES] = {0};
  size_t held = 0;
  double sum = 0.0;
  for (size_t n = 0; n < layout->outer; n++) {
    const NUMBER *row = x + n * layout->channels * layout->inner;
    for (size_t i = 0; i < layout->inner; i += CHUNK) {
      size_t left = layout->inner - i;
      size_t count = left < CHUNK ? left : CHUNK;
      NAME(add)(row + i, count, off, squares, lane);
      held += count;
      if (held >= CHUNK) {
        sum += NAME(flush)(lane);
        held = 0;
      }
    }
  }
  return sum + NAME(flush)(lane);
}

static void NAME(moments)(const even_norm_layout *layout, const NUMBER *x, double *mean, double *variance) {
  double count = (double)layout->outer * (double)layout->inner;
  for (size_t c = 0; c < layout->channels; c++) {
    const NUMBER *first = x + c * layout->inner;
    mean[c] = (double)first[0] + NAME(channel_sum)(layout, first, first[0], false) / count; /* few digits cancel */
    NUMBER off = (NUMBER)mean[c];
    double beside = mean[c] - (double)off;
    double squares = NAME(channel_sum)(layout, first, off, true) / count - beside * beside;
    variance[c] = squares < 0.0 ? 0.0 : squares; /* no number stays none */
  }
}

static void NAME(combine_channel)(size_t count, const NUMBER *restrict g, const NUMBER *restrict x, NUMBER off,
                                  NUMBER of_g, NUMBER of_x, NUMBER shift, NUMBER *restrict out) {
  for (size_t i = 0; i < count; i++) {
    out[i] = g[i] * of_g + ((x[i] - off) * of_x + shift);
  }
}

/* One number a channel of each: of the gradient, of the input beside its mean, and what is added. */
static void NAME(combine)(const even_norm_layout *layout, const NUMBER *g, const NUMBER *x, const NUMBER *mean,
                          const NUMBER *of_g, const NUMBER *of_x, const NUMBER *shift, NUMBER *out) {
  size_t first = 0;
  for (size_t n = 0; n < layout->outer; n++) {
    for (size_t c = 0; c < layout->channels; c++) {
      NAME(combine_channel)(layout->inner, g + first, x + first, mean[c], of_g[c], of_x[c], shift[c], out + first);
      first += layout->inner;
    }
  }
}
