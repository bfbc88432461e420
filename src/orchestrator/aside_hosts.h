/* Places that are set aside, of a job on several hosts: each host's list of devices is cut, and its agent told which
 * of its own it is to leave out (START). */
#ifndef EVEN_ORCHESTRATOR_ASIDE_HOSTS_H
#define EVEN_ORCHESTRATOR_ASIDE_HOSTS_H

#include "orchestrator/aside.h"
#include "orchestrator/host_agent.h"

/* Between two attempts, before the job is opened anew. */
even_status even_aside_hosts_cut(even_job *job) EVEN_MUST_USE;
/* An agent was started again, and has told of all its devices: those of before take part. */
even_status even_aside_host_cut_again(even_host_agent *agent, even_device_list *devices) EVEN_MUST_USE;
/* Whether places of any host are, or were, set aside. */
bool even_aside_hosts_any(const even_hosts *hosts);
/* Of `from` those whose numbers are in `used`. */
even_status even_aside_copy(const even_device_list *from, const size_t *used, size_t count,
                            even_device_list *out) EVEN_MUST_USE;
void even_aside_host_close(even_host_agent *agent);

#endif
