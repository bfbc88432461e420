/* Reads what a report shows of plan.json. */
#include "monitor/prediction.h"

#include "base/fail.h"
#include "base/json_reader.h"
#include "os/file.h"

#include <math.h>
#include <string.h>

enum { PLAN_LIMIT_BYTES = 16 << 20 };

static double number(const json_t *object, const char *key) {
  const json_t *value = json_object_get(object, key);
  return json_is_number(value) ? json_number_value(value) : NAN;
}

static even_status take(const char *origin, const char *policy, const json_t *plan, even_prediction *out) {
  const char *format = json_string_value(json_object_get(plan, "format"));
  const json_t *predicted = json_object_get(plan, "predicted");
  const json_t *pace = json_object_get(predicted, strcmp(policy, "equal") == 0 ? "equal" : "balanced");
  if (format == NULL || strcmp(format, "evenstep-plan-1") != 0 || !json_is_object(pace)) {
    even_status status = even_fail(EVEN_ERR_INPUT, "%s is no plan that this version reads", origin);
    (void)even_error_fix("make one with `evenstep plan`");
    return status;
  }
  *out = (even_prediction){.known = true,
                           .samples_per_second = number(pace, "samples_per_second"),
                           .step_seconds = number(pace, "step_seconds"),
                           .bound = number(predicted, "bound_samples_per_second")};
  return EVEN_OK;
}

even_status even_prediction_parse(const char *origin, const char *text, size_t bytes, const char *policy,
                                  even_prediction *out) {
  json_t *plan = NULL;
  *out = (even_prediction){.known = false};
  EVEN_TRY(even_json_parse(origin, text, bytes, &plan));
  even_status status = take(origin, policy, plan, out);
  json_decref(plan);
  return status;
}

even_status even_prediction_read(const char *path, const char *policy, even_prediction *out) {
  even_text content = EVEN_TEXT_EMPTY;
  *out = (even_prediction){.known = false};
  even_status status = even_file_read(path, PLAN_LIMIT_BYTES, &content);
  if (status == EVEN_OK) {
    status = even_prediction_parse(path, even_text_string(&content), content.length, policy, out);
  }
  even_text_free(&content);
  return status;
}
