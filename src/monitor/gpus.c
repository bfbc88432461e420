/* What the watch of the GPUs has, rank by rank. */
#include "monitor/gpus.h"

#include "base/alloc.h"

#include <stdio.h>

even_status even_monitor_gpus_open(even_monitor *monitor, const even_monitor_params *params) {
  even_device_source source = even_device_source_host;
  uint64_t every_ns = 0;
  if (params->gpus == NULL || !even_gpu_watch_every(monitor->limits.gpu_seconds, &every_ns)) {
    return EVEN_OK;
  }
  source.nvml_library = params->nvml_library != NULL ? params->nvml_library : source.nvml_library;
  return even_gpu_watch_open(&source, params->gpus, (size_t)params->ranks, every_ns, &monitor->gpus);
}

static void take_news(even_monitor *monitor, const even_gpu_news *news) {
  even_state_rank *at = &monitor->state->rank[news->gpu];
  bool lasts = news->fault == EVEN_GPU_SLOW;
  if (lasts && at->gpu_slow == (news->value != 0)) {
    return;
  }
  at->gpu_slow = lasts ? news->value != 0 : at->gpu_slow;
  char words[sizeof((even_state_event *)NULL)->words];
  (void)snprintf(words, sizeof words, "GPU of rank %zu (%.32s): %s", news->gpu, at->device, news->words);
  even_monitor_note(monitor, EVEN_EVENT_GPU, (int)news->gpu, !lasts ? -1 : news->value != 0 ? 1 : 0, words);
  if (monitor->notice != NULL) {
    monitor->notice(monitor->notice_context, words);
  }
}

void even_monitor_gpu_told(even_monitor *monitor, int rank, const even_gpu_sample *sample) {
  even_state_rank *at = &monitor->state->rank[rank];
  if (sample != NULL && sample->at_ns != at->gpu.at_ns) {
    at->gpu = *sample;
    EVEN_HISTORY(even_database_gpu(monitor->database, rank, sample));
  }
}

void even_monitor_gpu_fault(even_monitor *monitor, const even_gpu_news *news) {
  (void)pthread_mutex_lock(&monitor->lock);
  if (news->gpu < (size_t)monitor->state->ranks) {
    take_news(monitor, news);
  }
  (void)pthread_mutex_unlock(&monitor->lock);
}

void even_monitor_gpus_look(even_monitor *monitor) {
  even_gpu_news news;
  if (even_gpu_watch_is_over(monitor->gpus)) {
    even_gpu_watch_close(monitor->gpus);
    monitor->gpus = NULL;
  }
  for (int rank = 0; monitor->gpus != NULL && rank < monitor->state->ranks; rank++) {
    even_gpu_sample sample;
    if (!monitor->state->rank[rank].elsewhere) {
      even_gpu_watch_look(monitor->gpus, (size_t)rank, &sample);
      even_monitor_gpu_told(monitor, rank, &sample);
    }
  }
  while (even_gpu_watch_news(monitor->gpus, &news)) {
    take_news(monitor, &news);
  }
}
