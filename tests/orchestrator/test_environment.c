/* What a rank's environment says. */
#include "orchestrator/environment.h"
#include "support/fault.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

static even_device devices[3];

static int make_devices(void **state) {
  (void)state;
  memset(devices, 0, sizeof devices);
  for (int i = 0; i < 3; i++) {
    (void)strcpy(devices[i].name, i == 0 ? "cpu:0" : i == 1 ? "cuda:1" : "cuda:0");
    devices[i].kind = i == 0 ? EVEN_DEVICE_CPU : EVEN_DEVICE_CUDA;
    devices[i].cuda_index = i == 0 ? -1 : 2 - i;
    devices[i].cores = i == 0 ? 0.4 : 3.6;
  }
  return 0;
}

static const even_device_list list = {devices, 3};

static even_rank_place place_of(int rank) {
  return (even_rank_place){.rank = rank,
                           .devices = &list,
                           .master_port = 1234,
                           .attempt = 2,
                           .max_restarts = 5,
                           .telemetry_fd = -1,
                           .snapshot_fd = -1,
                           .job = "abc",
                           .run_folder = "/runs/a"};
}

static void assert_value(const even_environment *environment, const char *name, const char *value) {
  const char *found = even_environment_get(environment, name);
  if (value == NULL) {
    assert_null(found);
    return;
  }
  assert_non_null(found);
  assert_string_equal(found, value);
}

static void says_what_torchrun_says(void **state) {
  (void)state;
  char *const inherited[] = {(char *)"HOME=/root", (char *)"RANK=77", NULL};
  even_environment environment;
  even_rank_place place = place_of(1);
  assert_int_equal(even_environment_of_rank(&place, inherited, NULL, &environment), EVEN_OK);
  static const char *const expected[][2] = {
      {"HOME", "/root"},
      {"RANK", "1"},
      {"LOCAL_RANK", "1"},
      {"WORLD_SIZE", "3"},
      {"LOCAL_WORLD_SIZE", "3"},
      {"GROUP_RANK", "0"},
      {"GROUP_WORLD_SIZE", "1"},
      {"ROLE_RANK", "1"},
      {"ROLE_WORLD_SIZE", "3"},
      {"ROLE_NAME", "default"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", "1234"},
      {"TORCHELASTIC_RESTART_COUNT", "2"},
      {"TORCHELASTIC_MAX_RESTARTS", "5"},
      {"TORCHELASTIC_RUN_ID", "abc"},
      {"CUDA_VISIBLE_DEVICES", "1,0"},
      {"OMP_NUM_THREADS", "4"},
      {"PYTHONUNBUFFERED", "1"},
      {"PYTHON_COLORS", "0"},
      {"EVENSTEP_JOB", "abc"},
      {"EVENSTEP_RUN_DIR", "/runs/a"},
      {"EVENSTEP_DEVICE", "cuda:1"},
      {"EVENSTEP_TELEMETRY_FD", NULL},
      {"EVENSTEP_RESUME", NULL},
      {"EVENSTEP_RUN_SIGN_SEEN", NULL},
  };
  for (size_t i = 0; i < sizeof expected / sizeof expected[0]; i++) {
    assert_value(&environment, expected[i][0], expected[i][1]);
  }
  for (size_t i = 0; i < environment.count; i++) { /* each name once */
    for (size_t k = 0; k < i; k++) {
      size_t length = strcspn(environment.lines[i], "=") + 1;
      assert_int_not_equal(strncmp(environment.lines[i], environment.lines[k], length), 0);
    }
  }
  assert_null(environment.lines[environment.count]);
  even_environment_free(&environment);
}

static void keeps_the_users_wishes(void **state) {
  (void)state;
  char *const inherited[] = {(char *)"OMP_NUM_THREADS=9", (char *)"CUDA_VISIBLE_DEVICES=5,GPU-7",
                             (char *)"EVENSTEP_SEED=3",   (char *)"TORCH_NCCL_ASYNC_ERROR_HANDLING=0",
                             (char *)"PYTHON_COLORS=1",   NULL};
  char *const extra[] = {(char *)"EVENSTEP_PLAN=/p", (char *)"OMP_NUM_THREADS=8", NULL};
  even_environment environment;
  even_rank_place place = place_of(0);
  place.telemetry_fd = 6;
  place.resume = "/c/step-1";
  place.sign_seen = true;
  assert_int_equal(even_environment_of_rank(&place, inherited, extra, &environment), EVEN_OK);
  assert_value(&environment, "OMP_NUM_THREADS", "8");
  assert_value(&environment, "EVENSTEP_PLAN", "/p");
  assert_value(&environment, "EVENSTEP_SEED", "3");
  assert_value(&environment, "PYTHON_COLORS", "1");
  assert_value(&environment, "EVENSTEP_TELEMETRY_FD", "6");
  assert_value(&environment, "EVENSTEP_RESUME", "/c/step-1");
  assert_value(&environment, "EVENSTEP_RUN_SIGN_SEEN", "1");
  assert_value(&environment, "TORCH_NCCL_ASYNC_ERROR_HANDLING", "0");
  assert_value(&environment, "CUDA_VISIBLE_DEVICES", "GPU-7,5"); /* cuda:1 is the second that the user sees */
  even_environment_free(&environment);
}

/* Another host's variable is not what the job's hosts go by. */
static void tells_the_hosts_silence_whatever_is_set(void **state) {
  (void)state;
  char *const inherited[] = {(char *)"EVENSTEP_HOST_TIMEOUT=90", (char *)"EVENSTEP_UNSEEN_SECONDS=7", NULL};
  char *const extra[] = {(char *)"EVENSTEP_HOST_TIMEOUT=60", (char *)"EVENSTEP_UNSEEN_SECONDS=8", NULL};
  even_environment environment;
  even_rank_place place = place_of(0);
  assert_int_equal(even_environment_of_rank(&place, inherited, NULL, &environment), EVEN_OK);
  assert_value(&environment, "EVENSTEP_HOST_TIMEOUT", "90"); /* of no hosts */
  assert_value(&environment, "EVENSTEP_UNSEEN_SECONDS", NULL);
  even_environment_free(&environment);
  place.silence_ms = 20500;
  assert_int_equal(even_environment_of_rank(&place, inherited, extra, &environment), EVEN_OK);
  assert_value(&environment, "EVENSTEP_HOST_TIMEOUT", "20.5");
  assert_value(&environment, "EVENSTEP_UNSEEN_SECONDS", "8"); /* as the leader says */
  even_environment_free(&environment);
  place.unseen_seconds = 35.875;
  assert_int_equal(even_environment_of_rank(&place, inherited, extra, &environment), EVEN_OK);
  assert_value(&environment, "EVENSTEP_UNSEEN_SECONDS", "35.875");
  even_environment_free(&environment);
}

static void forgets_another_jobs(void **state) {
  (void)state;
  char *const inherited[] = {(char *)"EVENSTEP_RESUME=/other", (char *)"EVENSTEP_TELEMETRY_FD=3",
                             (char *)"EVENSTEP_JOB=outer",     (char *)"EVENSTEP_PLAN=/outer",
                             (char *)"EVENSTEP_SPEEDS=1,2",    (char *)"EVENSTEP_CHECKPOINT_EVERY=1",
                             (char *)"EVENSTEP_PLAN_STEPS=4",  (char *)"EVENSTEP_CHECKPOINT_KEEP=1",
                             (char *)"EVENSTEP_DATA=/data",    NULL};
  even_environment environment;
  even_rank_place place = place_of(0);
  assert_int_equal(even_environment_of_rank(&place, inherited, NULL, &environment), EVEN_OK);
  assert_value(&environment, "EVENSTEP_RESUME", NULL);
  assert_value(&environment, "EVENSTEP_TELEMETRY_FD", NULL);
  assert_value(&environment, "EVENSTEP_PLAN", NULL);
  assert_value(&environment, "EVENSTEP_SPEEDS", NULL);
  assert_value(&environment, "EVENSTEP_CHECKPOINT_EVERY", NULL);
  assert_value(&environment, "EVENSTEP_CHECKPOINT_KEEP", NULL);
  assert_value(&environment, "EVENSTEP_PLAN_STEPS", NULL);
  assert_value(&environment, "EVENSTEP_DATA", "/data"); /* the user's own */
  assert_value(&environment, "EVENSTEP_JOB", "abc");
  assert_value(&environment, "OMP_NUM_THREADS", "1"); /* less than half a core is still one thread */
  even_environment_free(&environment);
}

static even_status build(void *context) {
  char *const inherited[] = {(char *)"A=1", NULL};
  even_environment environment;
  even_rank_place place = place_of(1);
  (void)context;
  even_status status = even_environment_of_rank(&place, inherited, NULL, &environment);
  even_environment_free(&environment);
  return status;
}

static void survives_lack_of_memory(void **state) {
  (void)state;
  assert_true(fault_each_allocation(build, NULL) > 40);
}

int main(void) {
  const struct CMUnitTest tests[] = {
      cmocka_unit_test_setup(says_what_torchrun_says, make_devices),
      cmocka_unit_test_setup(keeps_the_users_wishes, make_devices),
      cmocka_unit_test_setup(tells_the_hosts_silence_whatever_is_set, make_devices),
      cmocka_unit_test_setup(forgets_another_jobs, make_devices),
      cmocka_unit_test_setup(survives_lack_of_memory, make_devices),
  };
  return cmocka_run_group_tests(tests, NULL, NULL);
}
