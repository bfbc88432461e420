/* What `evenstep plan` predicted of a run, for its report. */
#ifndef EVEN_MONITOR_PREDICTION_H
#define EVEN_MONITOR_PREDICTION_H

#include <evenstep/status.h>
#include <stdbool.h>
#include <stddef.h>

typedef struct even_prediction {
  bool known; /* else the rest says nothing; NAN: the plan does not say */
  double samples_per_second;
  double step_seconds;
  double bound; /* samples a second: the ranks' speeds added up */
} even_prediction;

/* Of a plan (plan.json), under the run's policy; `origin` is put into errors. EVEN_ERR_INPUT where it is none. */
even_status even_prediction_parse(const char *origin, const char *text, size_t bytes, const char *policy,
                                  even_prediction *out) EVEN_MUST_USE;
/* The same of a file. */
even_status even_prediction_read(const char *path, const char *policy, even_prediction *out) EVEN_MUST_USE;

#endif
