"""What the site is made with besides its pages: pictures of real schedules, and hooks of its generator."""
