/* Which checkpoint a job resumes from. */
#ifndef EVEN_ORCHESTRATOR_RESUME_H
#define EVEN_ORCHESTRATOR_RESUME_H

#include "base/text.h"

/* The newest whole checkpoint below `folder`: of the folders step-N (N a number) that hold a manifest.json, the one
 * with the largest N. Folders still being written end in ".partial" and never count. *out is left empty when there is
 * none, or no such folder. */
even_status even_checkpoint_newest(const char *folder, even_text *out) EVEN_MUST_USE;
/* Checks that `path` is a whole checkpoint: EVEN_ERR_NOT_FOUND when it is not there, EVEN_ERR_INPUT when it is not
 * one. */
even_status even_checkpoint_check(const char *path) EVEN_MUST_USE;

#endif
