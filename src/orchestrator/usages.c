/* From /proc and NVML here to the leader's observer there. */
#include "orchestrator/usages.h"

#include "base/alloc.h"
#include "base/fail.h"
#include "base/json_writer.h"
#include "orchestrator/follower.h"
#include "orchestrator/remote.h"
#include "os/clock.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static const uint64_t EVERY_NS = 1000000000u;
/* In one message: a rank takes some 500 bytes. */
enum { AT_ONCE = 64 };

typedef struct seen {
  pid_t pid;
  even_rank_usage usage;
  bool slow_told; /* the leader knows whether the clock of its GPU is held down: */
  uint64_t slow;
  char slow_words[sizeof((even_gpu_news *)NULL)->words];
} seen;

struct even_usages {
  size_t count;
  seen *ranks; /* one a rank of the job; of this host's alone anything is seen */
  even_gpu_watch *gpus;
  uint64_t looked_ns;
};

/* ---- of an agent that serves another one ---- */

/* Without figures of its GPUs a host does its part all the same. */
static void watch_gpus(const even_job *job, even_usages *usages) {
  const char **uuids = NULL;
  uint64_t every_ns = 0;
  if (!even_gpu_watch_every(job->params->gpu_seconds, &every_ns)) {
    return;
  }
  even_status status = EVEN_NEW_ARRAY(&uuids, job->count);
  for (size_t i = 0; status == EVEN_OK && i < job->count; i++) {
    uuids[i] = even_job_is_here(job, i) ? job->params->devices->items[i].uuid : "";
  }
  status = status == EVEN_OK ? even_gpu_watch_open(&even_device_source_host, uuids, job->count, every_ns, &usages->gpus)
                             : status;
  if (status != EVEN_OK) {
    usages->gpus = NULL;
    even_error_clear();
  }
  even_free((void *)uuids);
}

even_status even_usages_open(const even_job *job, even_usages **out) {
  even_usages *usages = NULL;
  *out = NULL;
  if (job->follower == NULL || job->params->telemetry_fd < 0) {
    return EVEN_OK;
  }
  EVEN_TRY(EVEN_NEW(&usages));
  usages->count = job->count;
  even_status status = EVEN_NEW_ARRAY(&usages->ranks, job->count);
  if (status != EVEN_OK) {
    even_usages_close(usages);
    return status;
  }
  watch_gpus(job, usages);
  *out = usages;
  return EVEN_OK;
}

void even_usages_close(even_usages *usages) {
  if (usages != NULL) {
    even_gpu_watch_close(usages->gpus);
    even_free(usages->ranks);
    even_free(usages);
  }
}

static void write_rank(even_json *json, size_t rank, const even_rank_usage *usage, const even_gpu_sample *gpu) {
  even_json_object(json, NULL);
  even_json_integer(json, "rank", (int64_t)rank);
  even_json_unsigned(json, "at_ns", usage->at_ns);
  even_json_number(json, "cpu_seconds", usage->cpu_seconds);
  even_json_number(json, "rss_bytes", usage->rss_bytes);
  even_json_number(json, "throttled_seconds", usage->throttled_seconds);
  even_json_number(json, "wait_seconds", usage->pressure.wait_seconds);
  even_json_number(json, "major_faults", usage->pressure.major_faults);
  even_json_number(json, "swap_bytes", usage->pressure.swap_bytes);
  even_json_number(json, "clock", usage->pressure.clock);
  even_json_unsigned(json, "workers", usage->workers);
  even_json_number(json, "workers_bytes", usage->workers_bytes);
  if (gpu != NULL) {
    even_json_object(json, "gpu");
    even_json_unsigned(json, "at_ns", gpu->at_ns);
    even_json_number(json, "clock_mhz", gpu->clock_mhz);
    even_json_number(json, "celsius", gpu->temperature_celsius);
    even_json_number(json, "watts", gpu->power_watts);
    even_json_number(json, "memory_bytes", gpu->memory_used_bytes);
    even_json_number(json, "percent", gpu->utilization_percent);
    even_json_number(json, "corrected", gpu->corrected);
    even_json_number(json, "uncorrected", gpu->uncorrected);
    even_json_number(json, "others_percent", gpu->user_count == 1 ? gpu->users[0].percent : (double)NAN);
    even_json_bool(json, "slowed", gpu->slowed);
    even_json_object_end(json);
  }
  even_json_object_end(json);
}

/* Numbers of processes mean nothing elsewhere: those that are no ranks become one, where anybody can be told apart. */
static void join_others(const even_job *job, even_gpu_sample *gpu) {
  double others = 0;
  bool known = gpu->user_count <= 0;
  for (int user = 0; user < gpu->user_count; user++) {
    bool own = false;
    for (size_t i = 0; i < job->count && !own; i++) {
      own = even_job_is_here(job, i) && job->ranks[i].alive && (long)job->ranks[i].pid == gpu->users[user].pid;
    }
    known = known || own;
    others += own ? 0 : gpu->users[user].percent;
  }
  gpu->user_count = known ? 1 : -1;
  gpu->users[0] = (even_gpu_user){.pid = -1, .percent = others};
}

/* Whether there is anything to say of it. */
static bool look_at(even_usages *usages, const even_job *job, size_t rank, uint64_t now_ns) {
  seen *at = &usages->ranks[rank];
  even_rank_usage usage;
  pid_t pid = job->ranks[rank].pid;
  if (!even_job_is_here(job, rank) || !job->ranks[rank].alive || pid == 0) {
    return false;
  }
  if (at->pid != pid) {
    at->pid = pid; /* what is known of its GPU stays */
    at->usage = (even_rank_usage){.throttled_seconds = NAN};
  }
  if (!even_usage_look(pid, now_ns, &at->usage, &usage)) {
    return false;
  }
  at->usage = usage;
  return true;
}

static void add_rank(even_usages *usages, const even_job *job, size_t rank, even_json *json) {
  even_gpu_sample gpu;
  even_gpu_watch_look(usages->gpus, rank, &gpu);
  if (gpu.at_ns != 0) {
    join_others(job, &gpu);
  }
  write_rank(json, rank, &usages->ranks[rank].usage, gpu.at_ns != 0 ? &gpu : NULL);
}

bool even_usages_report(even_usages *usages, const even_job *job, size_t *next, even_text *out) {
  uint64_t now = even_clock_ns();
  even_json json = even_json_begin(out, 0);
  int told = 0;
  even_json_object(&json, NULL);
  even_json_array(&json, "ranks");
  for (; *next < job->count && told < AT_ONCE; ++*next) {
    if (look_at(usages, job, *next, now)) {
      add_rank(usages, job, *next, &json);
      told++;
    }
  }
  even_json_array_end(&json);
  even_json_object_end(&json);
  return told > 0;
}

static void write_fault(even_json *json, const even_gpu_news *news) {
  even_json_object(json, NULL);
  even_json_unsigned(json, "rank", news->gpu);
  even_json_integer(json, "fault", news->fault);
  even_json_unsigned(json, "value", news->value);
  even_json_unsigned(json, "at_ns", news->at_ns);
  even_json_string(json, "words", news->words);
  even_json_object_end(json);
}

/* Of a GPU whose clock was not held down since it began to be watched. */
static const char usual_words[] = "its clock is held down no more";

/* Whether a clock is held down is told to each leader anew, once anything is known of the GPU. */
static int add_slow(even_usages *usages, const even_job *job, even_json *json) {
  int told = 0;
  for (size_t rank = 0; rank < usages->count; rank++) {
    seen *at = &usages->ranks[rank];
    even_gpu_sample gpu = {.at_ns = 0};
    if (!at->slow_told && even_job_is_here(job, rank)) {
      even_gpu_watch_look(usages->gpus, rank, &gpu);
    }
    if (gpu.at_ns == 0) {
      continue;
    }
    even_gpu_news news = {.gpu = rank, .fault = EVEN_GPU_SLOW, .value = at->slow, .at_ns = gpu.at_ns};
    (void)snprintf(news.words, sizeof news.words, "%s", at->slow_words[0] != '\0' ? at->slow_words : usual_words);
    write_fault(json, &news);
    at->slow_told = true;
    told++;
  }
  return told;
}

/* What lasts is kept, and told by add_slow. */
static bool take_news(even_usages *usages, even_gpu_news *news) {
  if (!even_gpu_watch_news(usages->gpus, news)) {
    return false;
  }
  if (news->fault == EVEN_GPU_SLOW) {
    seen *at = &usages->ranks[news->gpu];
    at->slow = news->value;
    at->slow_told = false;
    (void)snprintf(at->slow_words, sizeof at->slow_words, "%s", news->words);
  }
  return true;
}

bool even_usages_report_faults(even_usages *usages, const even_job *job, even_text *out) {
  even_gpu_news news;
  even_json json = even_json_begin(out, 0);
  int told = 0;
  even_json_object(&json, NULL);
  even_json_array(&json, "ranks");
  even_json_array_end(&json);
  even_json_array(&json, "faults");
  while (take_news(usages, &news)) {
    if (news.fault != EVEN_GPU_SLOW) {
      write_fault(&json, &news);
      told++;
    }
  }
  told += add_slow(usages, job, &json);
  even_json_array_end(&json);
  even_json_object_end(&json);
  return told > 0;
}

void even_usages_tell_faults(even_usages *usages, even_job *job) {
  even_text text = EVEN_TEXT_EMPTY;
  if (usages == NULL || usages->gpus == NULL || job->follower == NULL || !even_job_follower_is_heard(job)) {
    return; /* what there is waits for the next leader */
  }
  if (even_usages_report_faults(usages, job, &text)) {
    even_job_follower_send(job, EVEN_MESSAGE_USAGE, &text);
  } else {
    even_text_free(&text);
  }
}

void even_usages_retell(even_usages *usages) {
  for (size_t rank = 0; usages != NULL && rank < usages->count; rank++) {
    usages->ranks[rank].slow_told = false;
  }
}

void even_usages_hand_over(even_usages *usages, const even_job *job) {
  const even_agent_observer *observer = &job->params->observer;
  even_gpu_news news;
  while (usages != NULL && take_news(usages, &news)) {
    if (news.fault != EVEN_GPU_SLOW && observer->gpu_fault != NULL) {
      observer->gpu_fault(observer->context, &news);
    }
  }
  even_usages_close(usages);
}

static void close_idle_watch(even_usages *usages) {
  if (even_gpu_watch_is_over(usages->gpus)) {
    even_gpu_watch_close(usages->gpus);
    usages->gpus = NULL;
  }
}

void even_usages_tick(even_usages *usages, even_job *job) {
  uint64_t now = even_clock_ns();
  if (usages == NULL || job->follower == NULL) {
    return; /* or it leads by now, and whoever watches the job looks here by himself */
  }
  close_idle_watch(usages);
  even_usages_tell_faults(usages, job);
  if (now - usages->looked_ns < EVERY_NS) {
    return;
  }
  usages->looked_ns = now;
  for (size_t next = 0; next < job->count;) {
    even_text text = EVEN_TEXT_EMPTY;
    if (even_usages_report(usages, job, &next, &text)) {
      even_job_follower_send(job, EVEN_MESSAGE_USAGE, &text);
    } else {
      even_text_free(&text);
    }
  }
}

/* ---- of the leader ---- */

/* NAN where it is not known there; *fits is false for what is no amount of anything. */
static double amount(const json_t *object, const char *name, bool *fits) {
  const json_t *value = json_object_get(object, name);
  double number = json_is_number(value) ? json_number_value(value) : (double)NAN;
  *fits = *fits && (json_is_number(value) || json_is_null(value)) && !(number < 0);
  return number;
}

static uint64_t whole(const json_t *object, const char *name, bool *fits) {
  const json_t *value = json_object_get(object, name);
  *fits = *fits && json_is_integer(value) && json_integer_value(value) >= 0;
  return *fits ? (uint64_t)json_integer_value(value) : 0;
}

static bool read_usage(const json_t *said, even_rank_usage *out) {
  bool fits = true;
  *out = (even_rank_usage){.at_ns = whole(said, "at_ns", &fits),
                           .cpu_seconds = amount(said, "cpu_seconds", &fits),
                           .rss_bytes = amount(said, "rss_bytes", &fits),
                           .throttled_seconds = amount(said, "throttled_seconds", &fits),
                           .pressure = {.wait_seconds = amount(said, "wait_seconds", &fits),
                                        .major_faults = amount(said, "major_faults", &fits),
                                        .swap_bytes = amount(said, "swap_bytes", &fits),
                                        .clock = amount(said, "clock", &fits)},
                           .workers = (size_t)whole(said, "workers", &fits),
                           .workers_bytes = amount(said, "workers_bytes", &fits)};
  return fits && out->at_ns > 0 && isfinite(out->cpu_seconds) && isfinite(out->rss_bytes);
}

static bool read_gpu(const json_t *said, even_gpu_sample *out) {
  bool fits = json_is_object(said);
  *out = (even_gpu_sample){.at_ns = whole(said, "at_ns", &fits),
                           .clock_mhz = amount(said, "clock_mhz", &fits),
                           .temperature_celsius = amount(said, "celsius", &fits),
                           .power_watts = amount(said, "watts", &fits),
                           .memory_used_bytes = amount(said, "memory_bytes", &fits),
                           .utilization_percent = amount(said, "percent", &fits),
                           .corrected = amount(said, "corrected", &fits),
                           .uncorrected = amount(said, "uncorrected", &fits),
                           .users = {{.pid = -1, .percent = amount(said, "others_percent", &fits)}},
                           .slowed = json_is_true(json_object_get(said, "slowed"))};
  out->user_count = isfinite(out->users[0].percent) ? 1 : -1;
  return fits && out->at_ns > 0;
}

static even_status take_rank(even_job *job, const even_host_agent *agent, const json_t *said) {
  const even_agent_observer *observer = &job->params->observer;
  const json_t *number = json_object_get(said, "rank");
  const json_t *gpu = json_object_get(said, "gpu");
  even_rank_usage usage;
  even_gpu_sample sample = {.at_ns = 0};
  json_int_t rank = json_integer_value(number);
  if (!json_is_integer(number) || rank < 0 || !even_host_agent_has(agent, (size_t)rank)) {
    return even_fail(EVEN_ERR_INPUT, "what a rank takes that is not on host %s", agent->name);
  }
  if (!read_usage(said, &usage) || (gpu != NULL && !read_gpu(gpu, &sample))) {
    return even_fail(EVEN_ERR_INPUT, "what rank %lld takes of host %s, in numbers that are none", (long long)rank,
                     agent->name);
  }
  uint64_t offset = (uint64_t)agent->link->offset_ns; /* to this host's clock */
  usage.at_ns += offset;
  sample.at_ns += offset;
  if (observer->usage != NULL) {
    observer->usage(observer->context, (int)rank, &usage, gpu != NULL ? &sample : NULL);
  }
  return EVEN_OK;
}

static bool read_fault(const json_t *said, even_gpu_news *out) {
  bool fits = json_is_object(said);
  const char *words = json_string_value(json_object_get(said, "words"));
  uint64_t rank = whole(said, "rank", &fits);
  uint64_t fault = whole(said, "fault", &fits);
  *out = (even_gpu_news){.gpu = (size_t)rank,
                         .fault = (even_gpu_fault)fault,
                         .value = whole(said, "value", &fits),
                         .at_ns = whole(said, "at_ns", &fits)};
  if (!fits || fault > EVEN_GPU_LOST || words == NULL || words[0] == '\0' || strlen(words) >= sizeof out->words) {
    return false;
  }
  (void)snprintf(out->words, sizeof out->words, "%s", words);
  return true;
}

static even_status take_fault(even_job *job, const even_host_agent *agent, const json_t *said) {
  const even_agent_observer *observer = &job->params->observer;
  even_gpu_news news;
  if (!read_fault(said, &news) || !even_host_agent_has(agent, news.gpu)) {
    return even_fail(EVEN_ERR_INPUT, "a fault of a GPU of host %s that is none, or of a rank that is not there",
                     agent->name);
  }
  news.at_ns += (uint64_t)agent->link->offset_ns; /* to this host's clock */
  if (observer->gpu_fault != NULL) {
    observer->gpu_fault(observer->context, &news);
  }
  return EVEN_OK;
}

even_status even_usages_take(even_job *job, const even_host_agent *agent, const json_t *content) {
  const json_t *ranks = json_object_get(content, "ranks");
  const json_t *faults = json_object_get(content, "faults"); /* NULL: this one tells of none */
  size_t at = 0;
  json_t *said = NULL;
  if (!json_is_array(ranks)) {
    return even_fail(EVEN_ERR_INPUT, "what ranks take of host %s, of no ranks", agent->name);
  }
  json_array_foreach(ranks, at, said) {
    EVEN_TRY(take_rank(job, agent, said));
  }
  if (faults != NULL && !json_is_array(faults)) {
    return even_fail(EVEN_ERR_INPUT, "what ails GPUs of host %s, in no list", agent->name);
  }
  json_array_foreach(faults, at, said) {
    EVEN_TRY(take_fault(job, agent, said));
  }
  return EVEN_OK;
}
