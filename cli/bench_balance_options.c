/* What `evenstep bench balance` is asked to measure. */
#include "base/fail.h"
#include "cli/bench_balance.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_course(const char *word, size_t length) {
  static const char *const courses[] = {"steady", "slowing", "drifting", "bursty"};
  for (size_t i = 0; i < sizeof courses / sizeof courses[0]; i++) {
    if (strlen(courses[i]) == length && strncmp(courses[i], word, length) == 0) {
      return true;
    }
  }
  return false;
}

even_status even_bench_courses(const char *text) {
  for (const char *at = text;;) {
    size_t length = strcspn(at, ",");
    if (!is_course(at, length)) {
      (void)even_fail(EVEN_ERR_USAGE, "bench balance: \"%.*s\" in --courses is no course of speeds", (int)length, at);
      return even_error_fix("choose of steady, slowing, drifting and bursty: --courses drifting,bursty");
    }
    if (at[length] == '\0') {
      return EVEN_OK;
    }
    at += length + 1;
  }
}

static bool known_already(const even_bench_plan *plan, even_policy policy) {
  for (size_t i = 0; i < plan->policy_count; i++) {
    if (plan->policies[i] == policy) {
      return true;
    }
  }
  return false;
}

even_status even_bench_policies(const char *text, even_bench_plan *plan) {
  const char *at = text;
  plan->policy_count = 0;
  for (;;) {
    size_t length = strcspn(at, ",");
    char word[32];
    even_policy policy;
    (void)snprintf(word, sizeof word, "%.*s", (int)(length < sizeof word ? length : sizeof word - 1), at);
    if (even_policy_parse(word, &policy) != EVEN_OK) {
      const even_error why = *even_error_last();
      (void)even_fail(EVEN_ERR_USAGE, "bench balance: \"%s\" in --policies is no policy", word);
      return even_error_fix("%s", why.fix);
    }
    if (!known_already(plan, policy)) {
      plan->policies[plan->policy_count++] = policy;
    }
    if (at[length] == '\0') {
      return EVEN_OK;
    }
    at += length + 1;
  }
}

static even_status bad_speeds(const char *text, const char *why, size_t ranks) {
  (void)even_fail(EVEN_ERR_USAGE, "bench balance: --speeds %s: %s", text, why);
  return even_error_fix("give a speed above 0 for each of the %zu ranks, cases apart by commas: --speeds %s", ranks,
                        ranks == 2 ? "1:1,4:1" : "4:2:…");
}

even_status even_bench_speeds(const char *text, size_t ranks) {
  const char *at = text;
  size_t count = 0;
  for (;;) {
    char *end = NULL;
    errno = 0;
    double speed = strtod(at, &end);
    if (end == at || errno != 0 || !isfinite(speed) || !(speed > 0)) {
      return bad_speeds(text, "not numbers above 0", ranks);
    }
    count++;
    if (*end != ':' && *end != ',' && *end != '\0') {
      return bad_speeds(text, "not SPEED:SPEED,…", ranks);
    }
    if (*end != ':' && count != ranks) {
      return bad_speeds(text, "another number of ranks than -n says", ranks);
    }
    if (*end == '\0') {
      return EVEN_OK;
    }
    count = *end == ',' ? 0 : count;
    at = end + 1;
  }
}
