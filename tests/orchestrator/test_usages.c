/* What ranks take of another host: what its agent sees of a process there is what the leader's observer hears. */
#include "orchestrator/usages.h"

#include "orchestrator/remote.h"
#include "os/folder.h"

#include <dlfcn.h>
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "device/fake_nvml_state.h"

enum { RANKS = 4, HERE = 2 };

typedef struct heard {
  int count;
  int rank;
  even_rank_usage usage;
  bool has_gpu;
  even_gpu_sample gpu;
} heard;

static heard last;
static int fault_count;
static even_gpu_news fault; /* the last */
static char nvml_state[64];
static void *nvml;
static even_job_rank ranks[RANKS];
static even_device each_device[RANKS];
static const even_device_list devices = {.items = each_device, .count = RANKS};
static even_agent_params params;
static even_link wire = {.fd = -1, .offset_ns = 5};
static const even_host_agent there = {.index = 1, .name = "there", .link = &wire, .first = HERE, .count = 2};

static void take(void *context, int rank, const even_rank_usage *usage, const even_gpu_sample *gpu) {
  (void)context;
  last = (heard){.count = last.count + 1, .rank = rank, .usage = *usage, .has_gpu = gpu != NULL};
  last.gpu = gpu != NULL ? *gpu : last.gpu;
}

static void hear_fault(void *context, const even_gpu_news *news) {
  (void)context;
  fault_count++;
  fault = *news;
}

static int set_up(void **state) {
  (void)state;
  memset(&last, 0, sizeof last);
  memset(ranks, 0, sizeof ranks);
  memset(each_device, 0, sizeof each_device);
  fault_count = 0;
  params =
      (even_agent_params){.devices = &devices, .telemetry_fd = 0, .observer = {.usage = take, .gpu_fault = hear_fault}};
  return 0;
}

/* Rank 2 has a GPU, of a made-up NVML (tests/device): who opens it by its name gets the one that is open already. */
static int set_up_gpu(void **state) {
  (void)strcpy(nvml_state, "/tmp/evenstep-usages-XXXXXX");
  int file = mkstemp(nvml_state);
  assert_true(file >= 0);
  assert_int_equal(close(file), 0);
  assert_int_equal(setenv("EVENSTEP_FAKE_NVML_STATE", nvml_state, 1), 0);
  nvml = dlopen(FAKE_NVML, RTLD_NOW);
  assert_non_null(nvml);
  int result = set_up(state);
  (void)strcpy(each_device[HERE].uuid, "GPU-00010203");
  return result;
}

static int tear_down_gpu(void **state) {
  char name[96];
  (void)state;
  (void)snprintf(name, sizeof name, "%s.xid", nvml_state);
  (void)unlink(name); /* of a test that failed */
  (void)dlclose(nvml);
  (void)unsetenv("EVENSTEP_FAKE_NVML_STATE");
  return unlink(nvml_state);
}

static void say(const char *suffix, const char *words) {
  fake_nvml_say(nvml_state, suffix, words);
}

/* The leader of the job, or the agent of ranks 2 and 3, which serves it. */
static even_job side(bool leads) {
  return (even_job){.params = &params,
                    .ranks = ranks,
                    .count = RANKS,
                    .first = leads ? 0 : HERE,
                    .local = HERE,
                    .first_spare = RANKS,
                    .follower = leads ? NULL : (even_follower *)ranks /* nothing is sent by it here */};
}

static even_status tell(const char *text) {
  even_job leader = side(true);
  json_t *content = NULL;
  content = json_loads(text, 0, NULL); /* of a name that comes twice the last counts */
  assert_non_null(content);
  even_status status = even_usages_take(&leader, &there, content);
  json_decref(content);
  return status;
}

static void what_the_agent_sees_the_leader_hears(void **state) {
  even_job other = side(false);
  even_usages *usages = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  size_t next = 0;
  (void)state;
  ranks[3].alive = true;
  ranks[3].pid = getpid();
  ranks[0].alive = true; /* of the leader's host: its number means nothing here */
  ranks[0].pid = getpid();
  assert_int_equal(even_usages_open(&other, &usages), EVEN_OK);
  assert_non_null(usages);
  assert_true(even_usages_report(usages, &other, &next, &text));
  assert_int_equal(next, RANKS);
  assert_int_equal(tell(even_text_string(&text)), EVEN_OK);
  assert_int_equal(last.count, 1);
  assert_int_equal(last.rank, 3);
  assert_true(last.usage.at_ns > 0 && last.usage.cpu_seconds >= 0 && last.usage.rss_bytes > 1e5);
  assert_true(last.usage.pressure.major_faults >= 0);
  assert_false(last.has_gpu);
  ranks[3].alive = false; /* it has ended */
  even_text_clear(&text);
  next = 0;
  assert_false(even_usages_report(usages, &other, &next, &text));
  even_text_free(&text);
  even_usages_close(usages);
}

/* What comes next of faults, to the leader. */
static void await_fault(even_usages *usages, int count) {
  even_job other = side(false);
  while (fault_count < count) {
    even_text text = EVEN_TEXT_EMPTY;
    if (even_usages_report_faults(usages, &other, &text)) {
      assert_int_equal(tell(even_text_string(&text)), EVEN_OK);
    }
    even_text_free(&text);
    (void)usleep(1000);
  }
  assert_int_equal(fault_count, count);
  assert_int_equal(fault.gpu, HERE);
}

static void faults_of_gpus_there_are_told_here(void **state) {
  even_job other = side(false);
  even_usages *usages = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  (void)state;
  assert_int_equal(even_usages_open(&other, &usages), EVEN_OK);
  await_fault(usages, 1); /* a leader knows from the beginning how the clock is */
  assert_true(fault.fault == EVEN_GPU_SLOW && fault.value == 0 && fault.at_ns > 0);
  say(".xid", "79");
  await_fault(usages, 2);
  assert_true(fault.fault == EVEN_GPU_XID && fault.value == 79);
  assert_string_equal(fault.words, "Xid 79: the GPU has fallen off the bus");
  say("", "reasons 64\n");
  await_fault(usages, 3);
  assert_true(fault.fault == EVEN_GPU_SLOW && fault.value == 1);
  assert_non_null(strstr(fault.words, "held down by heat"));
  assert_false(even_usages_report_faults(usages, &other, &text)); /* once */
  even_text_free(&text);
  ranks[HERE].alive = true;
  ranks[HERE].pid = getpid(); /* another process: the GPU is the same */
  size_t next = 0;
  assert_true(even_usages_report(usages, &other, &next, &text));
  even_text_free(&text);
  even_usages_retell(usages); /* another leader: it hears of what lasts, and of no Xid again */
  await_fault(usages, 4);
  assert_true(fault.fault == EVEN_GPU_SLOW && fault.value == 1);
  assert_non_null(strstr(fault.words, "held down by heat"));
  even_usages_close(usages);
}

static size_t own_threads(void) {
  even_names names = {NULL, 0};
  assert_int_equal(even_folder_names("/proc/self/task", &names), EVEN_OK);
  size_t count = names.count;
  even_names_free(&names);
  return count;
}

/* As the leader says it: never. */
static void gpus_there_may_go_unwatched(void **state) {
  even_job other = side(false);
  even_usages *usages = NULL;
  even_text text = EVEN_TEXT_EMPTY;
  size_t next = 0;
  (void)state;
  params.gpu_seconds = (double)INFINITY;
  say(".xid", "79");
  ranks[HERE].alive = true;
  ranks[HERE].pid = getpid();
  size_t before = own_threads();
  assert_int_equal(even_usages_open(&other, &usages), EVEN_OK);
  assert_int_equal(own_threads(), before); /* none asks NVML */
  assert_true(even_usages_report(usages, &other, &next, &text));
  assert_int_equal(tell(even_text_string(&text)), EVEN_OK);
  assert_false(last.has_gpu);
  even_text_clear(&text);
  assert_false(even_usages_report_faults(usages, &other, &text));
  even_text_free(&text);
  even_usages_close(usages);
}

/* How often NVML was asked for events. */
static unsigned waits(void) {
  unsigned asked = 0;
  unsigned samples = 0;
  void *found = dlsym(nvml, "fake_nvml_counts");
  assert_non_null(found);
  void (*counts)(unsigned *, unsigned *) = NULL;
  memcpy(&counts, &found, sizeof counts);
  counts(&asked, &samples);
  return asked;
}

/* What came while nobody led is not lost. */
static void who_leads_next_knows_what_nobody_was_told(void **state) {
  even_job other = side(false);
  even_usages *usages = NULL;
  char name[96];
  (void)state;
  (void)snprintf(name, sizeof name, "%s.xid", nvml_state);
  say(".xid", "48");
  assert_int_equal(even_usages_open(&other, &usages), EVEN_OK);
  while (access(name, F_OK) == 0) { /* until the watch is given it, */
    (void)usleep(1000);
  }
  unsigned given = waits();
  while (waits() == given) { /* and asks for the next one */
    (void)usleep(1000);
  }
  even_job leader = side(true);
  even_usages_hand_over(usages, &leader);
  assert_int_equal(fault_count, 1);
  assert_true(fault.fault == EVEN_GPU_XID && fault.value == 48 && fault.gpu == HERE);
}

static void who_leads_looks_for_itself(void **state) {
  even_job leader = side(true);
  even_usages *usages = NULL;
  (void)state;
  assert_int_equal(even_usages_open(&leader, &usages), EVEN_OK);
  assert_null(usages);
  even_usages_tick(usages, &leader);
}

#define NUMBERS                                                                                          \
  "\"rank\":2,\"at_ns\":1000000000,\"cpu_seconds\":1.5,\"rss_bytes\":100000,\"throttled_seconds\":0.75," \
  "\"wait_seconds\":null,\"major_faults\":3,\"swap_bytes\":4096,\"clock\":0.5,\"workers\":2,\"workers_bytes\":7"
#define GPU                                                                                                        \
  "\"at_ns\":9,\"clock_mhz\":800,\"celsius\":91,\"watts\":null,\"memory_bytes\":1,\"percent\":90,\"corrected\":0," \
  "\"uncorrected\":0,\"others_percent\":40,\"slowed\":true"

static void every_number_comes(void **state) {
  (void)state;
  assert_int_equal(tell("{\"ranks\":[{" NUMBERS ",\"gpu\":{" GPU "}}]}"), EVEN_OK);
  assert_int_equal(last.rank, 2);
  assert_true(last.usage.at_ns == 1000000005); /* by the leader's clock */
  assert_float_equal(last.usage.cpu_seconds, 1.5, 0);
  assert_float_equal(last.usage.throttled_seconds, 0.75, 0);
  assert_true(isnan(last.usage.pressure.wait_seconds));
  assert_float_equal(last.usage.pressure.major_faults, 3, 0);
  assert_float_equal(last.usage.pressure.swap_bytes, 4096, 0);
  assert_float_equal(last.usage.pressure.clock, 0.5, 0);
  assert_int_equal(last.usage.workers, 2);
  assert_true(last.gpu.at_ns == 14);
  assert_true(last.has_gpu && last.gpu.slowed && isnan(last.gpu.power_watts));
  assert_float_equal(last.gpu.clock_mhz, 800, 0);
  assert_int_equal(last.gpu.user_count, 1);
  assert_float_equal(last.gpu.users[0].percent, 40, 0);
}

#define FAULT "\"rank\":2,\"fault\":0,\"value\":79,\"at_ns\":1000,\"words\":\"Xid 79\""

static void what_is_no_amount_is_refused(void **state) {
  static const char *const wrong[] = {
      "{}",
      "{\"ranks\":3}",
      "{\"ranks\":[3]}",
      "{\"ranks\":[{" NUMBERS ",\"rank\":1}]}", /* another host's */
      "{\"ranks\":[{" NUMBERS ",\"rank\":4}]}",
      "{\"ranks\":[{" NUMBERS ",\"rank\":-1}]}",
      "{\"ranks\":[{" NUMBERS ",\"rank\":\"2\"}]}",
      "{\"ranks\":[{" NUMBERS ",\"at_ns\":0}]}",
      "{\"ranks\":[{" NUMBERS ",\"at_ns\":-5}]}",
      "{\"ranks\":[{" NUMBERS ",\"cpu_seconds\":-1}]}",
      "{\"ranks\":[{" NUMBERS ",\"cpu_seconds\":null}]}",
      "{\"ranks\":[{" NUMBERS ",\"clock\":\"fast\"}]}",
      "{\"ranks\":[{" NUMBERS ",\"workers\":1.5}]}",
      "{\"ranks\":[{\"rank\":2,\"at_ns\":1,\"cpu_seconds\":1,\"rss_bytes\":1}]}",
      "{\"ranks\":[{" NUMBERS ",\"gpu\":{}}]}",
      "{\"ranks\":[{" NUMBERS ",\"gpu\":{" GPU ",\"celsius\":-300}}]}",
      "{\"ranks\":[],\"faults\":3}",
      "{\"ranks\":[],\"faults\":[3]}",
      "{\"ranks\":[],\"faults\":[{" FAULT ",\"rank\":1}]}", /* another host's */
      "{\"ranks\":[],\"faults\":[{" FAULT ",\"fault\":4}]}",
      "{\"ranks\":[],\"faults\":[{" FAULT ",\"fault\":-1}]}",
      "{\"ranks\":[],\"faults\":[{" FAULT ",\"value\":\"79\"}]}",
      "{\"ranks\":[],\"faults\":[{" FAULT ",\"words\":\"\"}]}",
      "{\"ranks\":[],\"faults\":[{" FAULT ",\"words\":79}]}",
  };
  (void)state;
  for (size_t i = 0; i < sizeof wrong / sizeof wrong[0]; i++) {
    if (tell(wrong[i]) != EVEN_ERR_INPUT) {
      fail_msg("taken: %s", wrong[i]);
    }
  }
  assert_int_equal(last.count, 0);
  assert_int_equal(fault_count, 0);
  assert_int_equal(tell("{\"ranks\":[],\"faults\":[{" FAULT "}]}"), EVEN_OK);
  assert_true(fault_count == 1 && fault.at_ns == 1005 && strcmp(fault.words, "Xid 79") == 0);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(what_the_agent_sees_the_leader_hears, set_up),
      cmocka_unit_test_setup_teardown(faults_of_gpus_there_are_told_here, set_up_gpu, tear_down_gpu),
      cmocka_unit_test_setup_teardown(gpus_there_may_go_unwatched, set_up_gpu, tear_down_gpu),
      cmocka_unit_test_setup_teardown(who_leads_next_knows_what_nobody_was_told, set_up_gpu, tear_down_gpu),
      cmocka_unit_test_setup(who_leads_looks_for_itself, set_up),
      cmocka_unit_test_setup(every_number_comes, set_up),
      cmocka_unit_test_setup(what_is_no_amount_is_refused, set_up),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
