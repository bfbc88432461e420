/* Any bytes as plan.json, for the two that read it, `evenstep plan` and a report: an error or sound numbers. */
#include "cli/plan_file.h"
#include "monitor/prediction.h"

#include <math.h>
#include <stdlib.h>

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static bool is_time(double value) {
  return isfinite(value) && value >= 0;
}

static void check(const even_plan *plan) {
  if (plan->batch <= 0 || plan->ranks == 0 || !is_time(plan->balanced_seconds) || !is_time(plan->equal_seconds) ||
      !is_time(plan->bound_samples_per_second) || !is_time(plan->without_seconds)) {
    abort();
  }
  for (size_t i = 0; i < plan->ranks; i++) {
    const even_plan_rank *rank = &plan->rank[i];
    if (rank->share < 0 || rank->share_equal < 0 || rank->memory_bytes < 0 || !is_time(rank->seconds) ||
        !is_time(rank->seconds_equal)) {
      abort();
    }
  }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
  const char *text = (const char *)data;
  even_plan plan;
  even_prediction prediction;
  even_status status = even_plan_parse("fuzz", text, size, &plan);
  if (status == EVEN_OK) {
    check(&plan);
  } else if (status != EVEN_ERR_INPUT) {
    abort();
  }
  even_plan_free(&plan);
  status = even_prediction_parse("fuzz", text, size, size % 2 == 0 ? "equal" : "dynamic", &prediction);
  if (prediction.known != (status == EVEN_OK) || (status != EVEN_OK && status != EVEN_ERR_INPUT)) {
    abort();
  }
  return 0;
}
