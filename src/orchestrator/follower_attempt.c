/* What an agent that serves a leader does of an attempt: its own ranks. */
#include "base/alloc.h"
#include "base/fail.h"
#include "orchestrator/follower_agent.h"
#include "orchestrator/follower_words.h"
#include "orchestrator/host_memory.h"
#include "orchestrator/job_attempt.h"
#include "orchestrator/outlast.h"
#include "orchestrator/usages.h"
#include "os/folder.h"
#include "os/path.h"
#include "os/pipe.h"

#include <string.h>

void even_follower_end_ranks(even_follower *follower) {
  if (follower->running && follower->job.stage != EVEN_JOB_KILLED) {
    even_job_end_ranks(&follower->job, SIGKILL, true);
  }
}

bool even_follower_is_leaderless(even_follower *follower) {
  return follower->gone || even_candidate_superseded(&follower->candidate);
}

static void on_tick(void *context) {
  even_follower *follower = context;
  even_follower_forward_records(follower);
  even_link_tick(&follower->link, follower->open && follower->job.alive > 0);
  even_follower_say_places(follower);
  even_parcels_tick(follower->parcels);
  even_bring_take_tick(follower->brings);
  if (even_follower_is_leaderless(follower) && !even_follower_may_hold(follower) && !even_follower_may_wait(follower)) {
    even_follower_end_ranks(follower);
  }
}

/* One that may take any place has all CPUs. */
static even_device spare_device(const even_follower *follower, size_t rank) {
  even_device device = follower->own.items[0];
  size_t number = rank - (size_t)(follower->start.world - follower->start.all_spares);
  (void)snprintf(device.name, sizeof device.name, "spare:%zu", number);
  device.cpus = NULL;
  device.cpu_count = 0;
  return device;
}

static even_status make_world(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  if (follower->world.items == NULL) {
    EVEN_TRY(EVEN_NEW_ARRAY(&follower->world.items, (size_t)start->world));
    follower->world.count = (size_t)start->world;
  }
  for (size_t i = 0; i < follower->world.count; i++) {
    even_device *device = &follower->world.items[i];
    bool own = i >= (size_t)start->first && i < (size_t)start->first + (size_t)start->count;
    bool spare = i >= (size_t)start->first_spare && i < (size_t)start->first_spare + (size_t)start->spares;
    *device = own     ? follower->own.items[i - (size_t)start->first]
              : spare ? spare_device(follower, i)
                      : (even_device){.name = "elsewhere", .numa_node = -1, .cuda_index = -1, .efficiency = -1};
  }
  return EVEN_OK;
}

static even_status open_telemetry(even_follower *follower, bool adopts) {
  if (!follower->start.telemetry) {
    return EVEN_OK;
  }
  if (adopts) {
    follower->telemetry_fd = even_outlast_telemetry(follower->legacy);
  } else {
    EVEN_TRY(even_telemetry_create_segment(follower->start.rings, 0, &follower->telemetry_fd));
  }
  EVEN_TRY(even_telemetry_reader_open(follower->telemetry_fd, &follower->reader));
  even_telemetry_reader_want_calls(follower->reader, follower->start.calls);
  return EVEN_OK;
}

static void loop_ready(void *context, int fd) {
  even_follower *follower = context;
  (void)fd;
  if (even_loop_turn(&follower->loop, 0) != EVEN_OK) {
    even_error_clear(); /* it says so again when it is turned by itself */
  }
}

/* `adopts`: that of the attempt that the agent before has left; a later one of this agent has ranks to start. */
static even_status open_job(even_follower *follower, bool adopts) {
  const even_remote_start *start = &follower->start;
  EVEN_TRY(make_world(follower));
  EVEN_TRY(open_telemetry(follower, adopts));
  follower->params = (even_agent_params){.size = sizeof follower->params,
                                         .devices = &follower->world,
                                         .command = start->command,
                                         .run_folder = start->run_folder,
                                         .environment = start->environment,
                                         .cpu_quota = start->quota,
                                         .telemetry_fd = follower->telemetry_fd,
                                         .hang_seconds = start->hang_seconds,
                                         .restart_hung = start->restart_hung,
                                         .notice_seconds = start->notice_seconds,
                                         .notice_every_seconds = start->notice_every_seconds,
                                         .gpu_seconds = start->gpu_seconds,
                                         .unpinned = start->unpinned,
                                         .max_restarts = start->max_restarts,
                                         .shrink = start->shrink,
                                         .replace = start->replace,
                                         .legacy = even_follower_legacy(follower),
                                         .memory = follower->kept.host,
                                         .spares = start->all_spares,
                                         .observer = even_follower_observer(follower)};
  follower->params.observer.tick = on_tick;
  const even_host_notice untold = follower->job.draining == 0 ? follower->job.own_notice : (even_host_notice){0};
  follower->job = (even_job){.params = &follower->params,
                             .count = follower->world.count,
                             .first = (size_t)start->first,
                             .local = (size_t)start->count,
                             .first_spare = (size_t)start->first_spare,
                             .spares = (size_t)start->spares,
                             .group = start->group,
                             .number = start->group,
                             .groups = start->groups,
                             .most_groups = start->most_groups,
                             .era = start->era,
                             .follower = follower,
                             .warm = &follower->next.warm,
                             .own_notice = untold,
                             .parcels = follower->parcels,
                             .adopted = adopts,
                             .loop = {.fd = -1},
                             .signals = {.fd = -1},
                             .guardian = {.pid = -1, .pipe = -1},
                             .generation_fd = -1,
                             .oom = {.kernel_log = -1}};
  memcpy(follower->job.id, start->job, sizeof follower->job.id);
  even_follower_interface(follower, follower->job.interface);
  follower->open = true;
  EVEN_TRY(even_job_open(&follower->job));
  return even_loop_add(&follower->job.loop, &follower->watch, follower->loop.fd, loop_ready, follower);
}

void even_follower_close_job(even_follower *follower) {
  if (follower->open) {
    even_job_close(&follower->job);
  }
  follower->open = follower->settled = false;
  even_telemetry_reader_close(follower->reader);
  follower->reader = NULL;
  even_pipe_close(follower->telemetry_fd);
  follower->telemetry_fd = -1;
  even_free(follower->world.items);
  follower->world = (even_device_list){NULL, 0};
}

/* Hosts have come, or gone: all that is counted by ranks is made anew. */
static bool is_same_world(const even_job *job, const even_remote_start *start) {
  return job->count == (size_t)start->world && job->first == (size_t)start->first &&
         job->local == (size_t)start->count && job->spares == (size_t)start->spares &&
         job->first_spare == (size_t)start->first_spare && job->group == start->group && job->groups == start->groups &&
         job->most_groups == start->most_groups && job->era == start->era;
}

/* Where one of its ranks comes to write checkpoints: after those before it are lost. A job does without, where there is
 * none; each attempt asks again. */
static void open_memory(even_follower *follower) {
  static const char name[] = "EVENSTEP_CHECKPOINT_MEMORY_EVERY=";
  for (size_t i = 0; follower->kept.host == NULL && follower->start.environment[i] != NULL; i++) {
    if (strncmp(follower->start.environment[i], name, sizeof name - 1) == 0 &&
        even_host_memory_open(&follower->kept.host) != EVEN_OK) {
      even_job_notice(&follower->job, "this host keeps no checkpoints in its memory: %s", even_error_last()->what);
      even_error_clear();
      break;
    }
  }
  follower->params.memory = follower->kept.host;
}

static void take_words(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  follower->params.command = start->command;
  follower->params.run_folder = start->run_folder;
  follower->params.environment = start->environment;
  follower->params.notice_from = start->notice_from;
  follower->params.cpu_quota = start->quota;
  follower->job.attempt = start->attempt;
  follower->job.late = start->late;
  memcpy(follower->job.master_address, start->master_address, sizeof follower->job.master_address);
}

even_status even_follower_open_left(even_follower *follower) {
  EVEN_TRY(even_outlast_memory(follower->legacy, &follower->kept.host));
  EVEN_TRY(open_job(follower, true));
  take_words(follower);
  return EVEN_OK;
}

/* What is new with each attempt. */
static even_status prepare_job(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  even_job *job = &follower->job;
  if (follower->host != start->group || (follower->open && !is_same_world(job, start))) {
    even_follower_close_job(follower);
    even_follower_close_parcels(follower);
    follower->host = start->group;
    EVEN_TRY(even_follower_open_parcels(follower));
  }
  if (!follower->open) {
    EVEN_TRY(open_job(follower, false));
    if (follower->next.warm == NULL) { /* whose processes are marked alike */
      even_job_sweep_another(job);
    }
  }
  open_memory(follower);
  take_words(follower);
  job->master_port = start->master_port;
  even_text_clear(&job->resume);
  if (start->resume != NULL) {
    even_text_add(&job->resume, start->resume);
    if (!even_path_is_folder(start->resume)) {
      (void)even_fail(EVEN_ERR_NOT_FOUND, "checkpoint %s is not there", start->resume);
      return even_error_fix("keep checkpoints where nobody removes them while a job restarts");
    }
  }
  return even_text_status(&job->resume);
}

void even_follower_say_settled(even_follower *follower) {
  even_text text = EVEN_TEXT_EMPTY;
  even_follower_words_settled(&follower->job, &text);
  even_follower_tell(follower, EVEN_MESSAGE_SETTLED, &text, NULL, 0);
}

/* As if they had been started, and ended by that signal. */
static void settle_recalled(even_follower *follower) {
  const even_remote_start *start = &follower->start;
  even_text settled = EVEN_TEXT_EMPTY;
  for (int rank = 0; rank < start->world; rank++) {
    even_text text = EVEN_TEXT_EMPTY;
    bool own = (rank >= start->first && rank < start->first + start->count) ||
               (rank >= start->first_spare && rank < start->first_spare + start->spares);
    if (!own) {
      continue;
    }
    even_follower_words_recalled(rank, follower->recalled, &text);
    even_follower_tell(follower, EVEN_MESSAGE_ENDED, &text, NULL, 0);
  }
  even_text_add(&settled, "{\"out_of_memory\":[]}");
  even_follower_tell(follower, EVEN_MESSAGE_SETTLED, &settled, NULL, 0);
}

/* To its end, or until this host leads it. */
static even_status run_ranks(even_follower *follower) {
  even_job *job = &follower->job;
  even_status status = job->adopted ? even_outlast_adopt(job) : even_job_begin_attempt(job);
  while (status == EVEN_OK && (even_job_attempt_lives(job) || even_follower_may_wait(follower)) && !follower->leads) {
    even_outlast_settle(job);
    status = even_job_turn(job);
    if (status == EVEN_OK && even_follower_is_leaderless(follower) && even_follower_may_hold(follower)) {
      status = even_follower_outlast(follower);
    } else if (status == EVEN_OK && even_follower_may_wait(follower)) {
      status = even_follower_wait(follower);
    }
  }
  if (status == EVEN_OK && follower->leads && even_job_attempt_lives(job)) {
    return EVEN_OK;
  }
  follower->running = false;
  even_outlast_settle(job);
  even_usages_tell_faults(job->usages, job); /* what has ended a rank, before its end */
  return even_job_finish_attempt(job, status);
}

/* A leader that did not lead the attempt hears nothing of its end. */
static void say_end(even_follower *follower, even_status status) {
  bool known = !follower->held;
  follower->held = false;
  if (known && status == EVEN_OK) {
    even_follower_say_settled(follower);
    follower->settled = true;
  } else if (known) {
    even_follower_say_error(follower, EVEN_MESSAGE_FAILED, even_error_last());
  }
}

even_status even_follower_answer_late(even_follower *follower) {
  json_t *asks = follower->checks;
  follower->checks = NULL;
  if (asks == NULL) {
    return EVEN_OK;
  }
  follower->held = false;
  follower->wait_until_ns = 0;
  even_follower_close_job(follower);
  even_status status = even_follower_check(follower, asks);
  json_decref(asks);
  return status;
}

even_status even_follower_run_attempt(even_follower *follower) {
  follower->asked = false;
  if (follower->recalled != 0) {
    settle_recalled(follower);
    return EVEN_OK;
  }
  even_status status = EVEN_OK;
  if (!follower->job.adopted) {
    status = prepare_job(follower);
    status = status == EVEN_OK ? even_follower_leave(follower) : status;
  }
  if (status == EVEN_OK) {
    follower->running = true;
    status = run_ranks(follower);
  }
  if (follower->running) {
    return EVEN_OK;
  }
  even_follower_forward_records(follower);
  say_end(follower, status);
  return even_follower_answer_late(follower);
}
