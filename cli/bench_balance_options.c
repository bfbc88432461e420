/* What `evenstep bench balance` is asked to measure. */
#include "base/fail.h"
#include "base/nearest.h"
#include "cli/bench_balance.h"
#include "os/path.h"

#include <errno.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static bool is_course(const char *word, size_t length) {
  static const char *const courses[] = {"steady", "slowing", "drifting", "bursty", "noise"};
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
      return even_error_fix("choose of steady, slowing, drifting, bursty and noise: --courses drifting,noise");
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

enum { MODELS = 4, MOST_SIZES = 5, LARGEST_SIZE = 1 << 20 };

/* As evenstep.bench_work knows them. */
static const struct {
  const char *name;
  bool images;
  const char *sizes[MOST_SIZES];
  size_t count;
} models[MODELS] = {
    {"simplecnn", true, {"width", "side", "classes"}, 3},
    {"resnet50", true, {"blocks", "width", "side", "classes"}, 4},
    {"bert", false, {"layers", "width", "heads", "length", "words"}, 5},
    {"gpt2", false, {"layers", "width", "heads", "length", "words"}, 5},
};

static even_status unknown_model(const char *name) {
  const char *names[MODELS];
  for (size_t i = 0; i < MODELS; i++) {
    names[i] = models[i].name;
  }
  const char *nearest = even_nearest(name, names, MODELS);
  (void)even_fail(EVEN_ERR_USAGE, "bench balance: --model %s is none that is known", name);
  return even_error_fix("%s%s%ssimplecnn, resnet50, bert, gpt2", nearest == NULL ? "" : "did you mean ",
                        nearest == NULL ? "" : nearest, nearest == NULL ? "" : "? There are ");
}

static even_status bad_sizes(size_t model, const char *text, size_t length) {
  char list[96] = "";
  for (size_t i = 0, at = 0; i < models[model].count && at < sizeof list; i++) {
    at += (size_t)snprintf(list + at, sizeof list - at, "%s%s", i > 0 ? ", " : "", models[model].sizes[i]);
  }
  (void)even_fail(EVEN_ERR_USAGE, "bench balance: \"%.*s\" in --model-sizes is no size of %s", (int)length, text,
                  models[model].name);
  return even_error_fix("give NAME=NUMBER of %s, apart by commas, or `published`", list);
}

static bool is_size(size_t model, const char *text, size_t length) {
  for (size_t i = 0; i < models[model].count; i++) {
    size_t name = strlen(models[model].sizes[i]);
    if (length <= name + 1 || strncmp(text, models[model].sizes[i], name) != 0 || text[name] != '=' ||
        text[name + 1] < '0' || text[name + 1] > '9') {
      continue;
    }
    char *end = NULL;
    errno = 0;
    long value = strtol(text + name + 1, &end, 10);
    long least = strcmp(models[model].sizes[i], "blocks") == 0 ? 0 : 1;
    if (end == text + length && errno == 0 && value >= least && value <= LARGEST_SIZE) {
      return true;
    }
  }
  return false;
}

even_status even_bench_model(const char *name, const char *sizes, const char *data) {
  size_t model = 0;
  while (model < MODELS && strcmp(models[model].name, name) != 0) {
    model++;
  }
  if (model == MODELS) {
    return unknown_model(name);
  }
  for (const char *at = sizes; at != NULL && strcmp(sizes, "published") != 0;) {
    size_t length = strcspn(at, ",");
    if (!is_size(model, at, length)) {
      return bad_sizes(model, at, length);
    }
    at = at[length] == ',' ? at + length + 1 : NULL;
  }
  if (data != NULL && !models[model].images) {
    (void)even_fail(EVEN_ERR_USAGE, "bench balance: --data %s: %s reads text, and CIFAR is images", data, name);
    return even_error_fix("--model simplecnn or --model resnet50, or leave --data out");
  }
  if (data != NULL && !even_file_readable(data)) {
    (void)even_fail(EVEN_ERR_USAGE, "bench balance: --data %s cannot be read", data);
    return even_error_fix("give the folder or archive of CIFAR-10's or CIFAR-100's binary version");
  }
  return EVEN_OK;
}
