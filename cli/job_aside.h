/* A job without some of its devices. */
#ifndef EVEN_CLI_JOB_ASIDE_H
#define EVEN_CLI_JOB_ASIDE_H

#include "cli/job_setup.h"
#include "cli/job_view.h"
#include "orchestrator/aside.h"

/* What a setup had before devices were set aside; zeros: none was yet. */
typedef struct even_job_devices {
  even_device_list devices;
  double *quota;
  bool *shown;
} even_job_devices;

/* --set-aside, with what does not go together with it. */
even_status even_job_check_aside(const even_job_options *options) EVEN_MUST_USE;
/* Lets those devices of `all` (the setup's own, the first time) take part that are not set aside: ranks, quotas, what
 * is shown and speeds follow. */
even_status even_job_setup_without(const even_job_options *options, const even_aside *aside, even_job_devices *all,
                                   even_job_setup *setup) EVEN_MUST_USE;
/* Of several hosts, under another leader, or with an agent that is started in a killed one's place: the places that
 * were set aside stay so, where enough are left without. The hosts have been reached, and their devices not counted
 * yet. */
even_status even_job_inherit_aside(const even_job_options *options, even_job_setup *setup) EVEN_MUST_USE;
/* The same of one host, in a killed agent's place: as even_job_setup_without. */
even_status even_job_keep_aside(const even_job_options *options, even_job_devices *all,
                                even_job_setup *setup) EVEN_MUST_USE;
/* Which these are, and for how long; nothing under --quiet. */
void even_job_tell_aside(const even_aside *aside, even_job_view *view);
/* Before the setup is closed: it has all its devices again. */
void even_job_setup_whole(even_job_devices *all, even_job_setup *setup);

#endif
