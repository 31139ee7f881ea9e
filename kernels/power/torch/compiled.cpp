// What torch does slowly in float32 on a CPU: see each file.

#include "attention.h"
#include "attention_form.h"
#include "copies.h"
#include "features.h"
#include "gated_sums.h"
