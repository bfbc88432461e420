/* The history of a job under `evenstep chaos`, as its agent writes it. */
#include "base/fail.h"
#include "cli/chaos.h"

long even_chaos_last_step(const even_chaos_job *job) {
  return job->history == NULL ? -1 : even_history_state(job->history)->last_step;
}

const char *even_chaos_led_folder(const even_chaos_job *job) {
  return even_text_string(job->led_folder.length > 0 ? &job->led_folder : &job->folder);
}

/* Where an agent was killed, its history and agent.json lie there still when the next one has the folder, until that
 * one writes its own: whoever opens it then reads of nothing that happens. */
static void open_history(even_chaos_job *job) {
  if (!even_history_alive(even_chaos_led_folder(job)) ||
      even_history_open(even_chaos_led_folder(job), &job->history) != EVEN_OK) {
    even_error_clear(); /* it is not there yet, or is being written */
    return;
  }
  if (even_history_state(job->history)->started_ns < job->started_ns) {
    even_history_close(job->history);
    job->history = NULL;
  }
}

void even_chaos_read_history(even_chaos_job *job) {
  if (job->apart) {
    return;
  }
  if (job->history == NULL) {
    open_history(job);
  } else if (even_history_read(job->history) != EVEN_OK) {
    even_error_clear();
  }
}
