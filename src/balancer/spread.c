/* Winsorised values. */
#include "balancer/spread.h"

#include <math.h>

/* Cut to the next at each end. */
static int trimmed(int count) {
  return count < 3 ? 0 : (count < 16 ? 1 : count / 10);
}

/* Only the least ones are kept in order: most of a window are passed over by one comparison, where sorting all of it
 * was half of a step's cost. */
double even_spread_at(const double *values, int count, int before, double times) {
  double kept[EVEN_SPREAD_MOST / 10 + 1] = {0};
  int held = 0;
  for (int i = 0; i < count; i++) {
    double value = times * values[i];
    if (held > before && value >= kept[before]) {
      continue;
    }
    int at = held > before ? before : held++;
    for (; at > 0 && kept[at - 1] > value; at--) {
      kept[at] = kept[at - 1];
    }
    kept[at] = value;
  }
  return times * kept[before];
}

double even_spread_cut(const even_spread *limits, double value) {
  return fmax(limits->low, fmin(limits->high, value));
}

even_spread even_spread_of(const double *values, int count) {
  even_spread out = {0};
  int cut = trimmed(count);
  out.low = even_spread_at(values, count, cut, 1.0);
  out.high = count == 2 ? out.low : even_spread_at(values, count, cut, -1.0);
  double sum = 0.0;
  for (int i = 0; i < count; i++) {
    sum += even_spread_cut(&out, values[i]);
  }
  out.mean = sum / count;
  double squares = 0.0;
  for (int i = 0; i < count; i++) {
    double off = even_spread_cut(&out, values[i]) - out.mean;
    squares += off * off;
  }
  out.deviation = count > 1 ? sqrt(squares / (count - 1)) : 0.0;
  return out;
}
