/* Places that are set aside, of a job on several hosts: each host's list of devices is cut, and its agent told which
 * of its own it is to leave out (START). */
#ifndef EVEN_ORCHESTRATOR_ASIDE_HOSTS_H
#define EVEN_ORCHESTRATOR_ASIDE_HOSTS_H

#include "orchestrator/aside.h"
#include "orchestrator/host_agent.h"

/* Before an attempt for which the job is opened, or opened anew. `own`: the devices that this host has for it now. */
even_status even_aside_hosts_cut(even_hosts *hosts, const even_aside *aside, const even_device_list *own) EVEN_MUST_USE;
/* The same of another host's, which has told of all its devices: an attempt of its ranks runs. */
even_status even_aside_host_cut(even_host_agent *agent, const even_aside *aside) EVEN_MUST_USE;
/* Before that, under another leader: those whose time is over take part again; all do where fewer than `least` ranks,
 * or none of a host, were left without the others. */
void even_aside_hosts_return(const even_hosts *hosts, const even_device_list *own, int64_t least, uint64_t now_ns,
                             even_aside *aside);
/* An agent was started again, and has told of all its devices: those of before take part. */
even_status even_aside_host_cut_again(even_host_agent *agent, even_device_list *devices) EVEN_MUST_USE;
/* Whether places of any host are, or were, set aside. */
bool even_aside_hosts_any(const even_hosts *hosts);
/* Of `from` those whose numbers are in `used`. */
even_status even_aside_copy(const even_device_list *from, const size_t *used, size_t count,
                            even_device_list *out) EVEN_MUST_USE;
void even_aside_host_close(even_host_agent *agent);

#endif
