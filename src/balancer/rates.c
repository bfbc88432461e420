/* Shares by what each rank does in a second; see rates.h. */
#include "balancer/rates.h"

#include "balancer/state.h"
#include "base/fail.h"

#include <string.h>

/* A gain that is worth a trial: less is what tiles, stalls and ranks that scatter take. */
static const double hoped_gain = 0.1;

/* Tables through the origin, and how far each rank may go: twice what it has, as along a line. A rank without samples
 * shows no rate: it is probed. The longest mean time of a rank; 0: nothing to ask. */
static double set_rates(even_balancer *b) {
  const even_guard *g = &b->guard;
  double longest = 0.0;
  for (size_t r = 0; r < b->ranks; r++) {
    int64_t twice = b->current[r] < b->batch / 2 ? 2 * b->current[r] : b->batch;
    double seconds = b->current[r] > 0 ? g->busy[r] / (double)b->current[r] : 1.0;
    if (g->floors[r] > 0.0 || !(seconds > 0.0)) {
      return 0.0; /* stopped by a quota: other trials ask */
    }
    longest = b->current[r] > 0 && g->busy[r] > longest ? g->busy[r] : longest;
    b->reach[r] = b->caps[r] >= 0 && b->caps[r] < twice ? b->caps[r] : twice;
    even_balancer_expect_rate(b, r, seconds);
  }
  return longest;
}

even_status even_rates_hope(even_balancer *b, bool *any) {
  double promised = 0.0;
  double longest = set_rates(b);
  *any = false;
  if (longest > 0.0) {
    EVEN_TRY(even_solve(&b->room, b->costs, b->reach, b->batch, b->candidate, &promised));
    bool other = memcmp(b->candidate, b->current, b->ranks * sizeof *b->current) != 0;
    *any = other && promised < longest * (1.0 - hoped_gain);
  }
  return EVEN_OK;
}
