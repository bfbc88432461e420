/* The names of the balancing policies. */
#include "base/fail.h"
#include "base/nearest.h"

#include <evenstep/balancer.h>
#include <string.h>

static const struct {
  even_policy policy;
  const char *name;
} policies[] = {
#define EVEN_POLICY_ROW(policy, number, text) {EVEN_POLICY_##policy, text},
    EVEN_POLICY_LIST(EVEN_POLICY_ROW)
#undef EVEN_POLICY_ROW
};

enum { POLICY_COUNT = sizeof policies / sizeof policies[0] };

even_status even_policy_parse(const char *text, even_policy *out) {
  const char *names[POLICY_COUNT];
  size_t named = 0;
  if (text == NULL || out == NULL) {
    return even_fail(EVEN_ERR_ARGUMENT, "balancer: no policy was given");
  }
  for (size_t i = 0; i < POLICY_COUNT; i++) {
    if (policies[i].policy == EVEN_POLICY_CALLBACK) {
      continue;
    }
    if (strcmp(policies[i].name, text) == 0) {
      *out = policies[i].policy;
      return EVEN_OK;
    }
    names[named++] = policies[i].name;
  }
  (void)even_fail(EVEN_ERR_ARGUMENT, "balancer: unknown policy \"%s\"", text);
  const char *nearest = even_nearest(text, names, named);
  if (nearest != NULL) {
    return even_error_fix("did you mean %s? There are auto, equal, proportional, dynamic and hybrid", nearest);
  }
  return even_error_fix("choose auto, equal, proportional, dynamic or hybrid");
}

const char *even_policy_name(even_policy policy) {
  for (size_t i = 0; i < POLICY_COUNT; i++) {
    if (policies[i].policy == policy) {
      return policies[i].name;
    }
  }
  return "unknown";
}
